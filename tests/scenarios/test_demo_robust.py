"""Bad input, clients that go away, and the ends of the process."""

from __future__ import annotations

import json
import socket
import subprocess
import threading

import httpx
import openai
import pytest

from tests.scenarios.served import COMMAND, served

HELLO = [{"role": "user", "content": "Say hello."}]
LONG = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 70}]
VERY_LONG = [{"role": "user", "content": "Pack my box with five dozen jugs. " * 300}]


def body(**changes):
    return {"messages": HELLO, "max_tokens": 2, **changes}


BAD_BODIES = {
    "no messages": (body(messages=[]), "messages"),
    "messages missing": ({"max_tokens": 2}, "messages"),
    "unknown role": (body(messages=[{"role": "wizard", "content": "x"}]), "role"),
    "content is a number": (body(messages=[{"role": "user", "content": 3}]), "content"),
    "messages is a string": (body(messages="hello"), "messages"),
    "temperature is a string": (body(temperature="hot"), "temperature"),
    "temperature is true": (body(temperature=True), "temperature"),
    "max_tokens 0": (body(max_tokens=0), "max_tokens"),
    "max_tokens negative": (body(max_tokens=-5), "max_tokens"),
    "longer than the context": (
        body(messages=[{"role": "user", "content": "a b c d e f " * 2000}]),
        "messages",
    ),
    "not supported yet": (body(tools=[{"type": "function"}]), "tools"),
    "unknown field": (body(temprature=1), "temprature"),
}


def post(server, **more):
    headers = {"Content-Type": "application/json"}
    url = f"{server.url}/v1/chat/completions"
    return httpx.post(url, headers=headers, timeout=60, **more)


def assert_refused(response, param=None, statuses=(400,)):
    assert response.status_code in statuses
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 10
    assert "Traceback" not in response.text
    if param is not None:
        assert param in error["param"]


def assert_still_serves(server):
    assert post(server, json=body()).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", BAD_BODIES)
def test_bad_input_is_refused_and_the_next_request_works(server, name):
    sent, param = BAD_BODIES[name]
    assert_refused(post(server, json=sent), param)
    assert_still_serves(server)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b'"text"', b'{"messages": "\xff\xfe"}', b"{" * 5000, b"NaN"],
)
def test_what_is_no_json_object_is_refused(server, content):
    assert_refused(post(server, content=content))
    assert_still_serves(server)


def test_a_huge_body_is_refused_without_being_read(server):
    before = server.resident_bytes()
    padding = b"x" * (1024 * 1024)

    def chunks():
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(100):
            yield padding
        yield b'"}]}'

    try:
        response = post(server, content=chunks())
    except httpx.WriteError:
        pass  # The server may close before all is sent.
    else:
        assert_refused(response, statuses=(413,))
    assert server.resident_bytes() - before < 64 * 1024 * 1024
    assert_still_serves(server)


def test_the_sdk_raises_its_own_exceptions(server):
    with pytest.raises(openai.BadRequestError) as bad:
        server.client.chat.completions.create(model=server.model, messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.chat.completions.create(model="llama-99", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert server.model in str(missing.value)


def test_health_answers_while_a_prompt_is_read(server):
    done = {}

    def read_long_prompt():
        done["answer"] = post(server, json=body(messages=LONG))

    thread = threading.Thread(target=read_long_prompt)
    thread.start()
    # It answered, and says that the prompt was still being read.
    server.engine_when(lambda engine: engine["running"] == 1)
    thread.join()
    assert done["answer"].json()["mtplx"]["prefill_chunks"] >= 2


def test_a_client_that_leaves_a_stream_stops_its_work(server):
    """It asks for thousands of tokens and leaves; the engine is free again long before
    they could have been made."""
    before = server.health()["engine"]["iterations"]
    drop_stream(server, body(max_tokens=5000, stream=True))
    after = server.engine_when(lambda engine: engine["running"] == 0)
    assert after["iterations"] - before < 4000


def test_a_client_that_gives_up_waiting_stops_its_work(server):
    """It does not stream, so nothing is written that could fail."""
    before = server.health()["engine"]["iterations"]
    send_and_leave(server, body(messages=VERY_LONG, max_tokens=5000))
    after = server.engine_when(lambda engine: engine["running"] == 0)
    assert after["iterations"] - before < 4000


def test_a_client_that_leaves_during_a_prefill_stops_it_and_loses_nothing(server):
    talk = [{"role": "user", "content": "One, two, three, four, five. " * 150}]
    send_and_leave(server, body(messages=talk))
    server.engine_when(lambda engine: engine["running"] == 0)
    again = post(server, json=body(messages=talk)).json()["mtplx"]
    assert 0 < again["cached_tokens"] < again["prompt_tokens"] - 1


def send_and_leave(server, sent):
    """Send a request, see that the engine has begun, and close the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(sent).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        f"Host: {host}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        server.engine_when(lambda engine: engine["running"] == 1)


def drop_stream(server, sent):
    """Open a stream and leave at its first text."""
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=sent, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and '"content":""' not in line:
                return
    raise AssertionError("The stream had no text.")


def test_fifty_dropped_streams_leave_nothing(server):
    def drop(times):
        for _ in range(times):
            drop_stream(server, body(max_tokens=500, stream=True))
            server.engine_when(lambda engine: engine["running"] == 0)

    drop(10)
    settled = server.resident_bytes() - server.health()["engine"]["bank_bytes"]
    drop(40)
    health = server.health()["engine"]
    assert (health["running"], health["waiting"], health["pinned"]) == (0, 0, 0)
    growth = server.resident_bytes() - health["bank_bytes"] - settled
    assert growth < 40 * 1024 * 1024
    assert_still_serves(server)


def test_ctrl_c_ends_cleanly_while_a_stream_runs(demo_folder):
    with served("demo") as server:
        lines = []

        def read():
            with httpx.stream(
                "POST",
                f"{server.url}/v1/chat/completions",
                json=body(max_tokens=5000, stream=True),
                timeout=60,
            ) as response:
                lines.extend(response.iter_lines())

        thread = threading.Thread(target=read)
        thread.start()
        server.engine_when(lambda engine: engine["running"] == 1)
        assert server.interrupt() == 0
        thread.join(60)
        assert not thread.is_alive()
        assert "Traceback" not in "".join(server.log)
    last = [line for line in lines if line.startswith("data: ")][-1]
    assert "error" in json.loads(last.removeprefix("data: "))


def test_a_taken_port_is_one_line(server):
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [*COMMAND, "serve", "demo", "--port", port], capture_output=True, text=True
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "taken" in line]
    assert len(said) == 1
    assert "Traceback" not in done.stderr
