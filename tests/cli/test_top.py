"""``mtplx top`` in a pseudo-terminal, before a server with a scripted engine."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pexpect
import pytest

from mtplx.cli.top_view import Watched, draw
from tests.server.conftest import Server
from tests.server.fakes import ANSWER_TOKENS, INFO, FakeEngine

COMMAND = ["-c", "from mtplx.cli.main import main; main()", "top"]
TIMEOUT_S = 60
CTRL_C = "\x03"


@pytest.fixture
def server():
    running = Server(FakeEngine())
    yield running
    running.stop()


@pytest.fixture
def top(tmp_path):
    """Return a function that starts the command in a terminal of its own."""
    opened = []

    def start(url, *arguments):
        environment = os.environ | {
            "HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path),
            "TERM": "xterm",
            "NO_COLOR": "1",
        }
        child = pexpect.spawn(
            sys.executable,
            [*COMMAND, "--url", url, *arguments],
            timeout=TIMEOUT_S,
            encoding="utf-8",
            dimensions=(40, 140),
            env=environment,
        )
        opened.append(child)
        return child

    yield start
    for child in opened:
        child.close(force=True)


def chat(server):
    message = {"role": "user", "content": "Hello there"}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [message]}, trust_env=False
    )
    return answer.json()["id"].removeprefix("chatcmpl-")


def test_it_shows_what_happens_and_quits_on_q(server, top):
    child = top(server.url)
    child.expect_exact(f"{INFO.name} at {server.url}")
    child.expect("0 running, 0 waiting")
    child.expect("KV state")
    child.expect_exact("Nothing is kept yet.")
    name = chat(server)
    child.expect(f"{name[:4]} +done")
    child.expect(rf"{name[:4]} \S*stop, \d s ago .* {ANSWER_TOKENS} tokens")
    child.expect(r"0–\d+\S* [\d.]+ K?i?B, restored 1 times\S*\s+\S*<user>He")
    assert len(server.engine.sinks) == 1
    child.send("q")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0
    server.engine.wait(lambda: not server.engine.sinks)


def test_ctrl_c_ends_it_too_and_the_terminal_is_as_before(server, top):
    child = top(server.url)
    child.expect("running")
    child.send(CTRL_C)
    child.expect_exact("\x1b[?1049l")  # The screen of before.
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0


def test_a_server_that_stops_is_told(server, top):
    child = top(server.url)
    child.expect("running")
    server.stop()
    child.expect("mtplx: The server at .* has stopped.")
    child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 1


def test_nobody_there_and_a_wrong_key_are_clear(top):
    child = top("http://127.0.0.1:9")
    child.expect("Nobody answers at http://127.0.0.1:9")
    server = Server(FakeEngine(), api_key="right")
    try:
        child = top(server.url, "--api-key", "wrong")
        child.expect("This API key is not known here")
        child = top(server.url, "--api-key", "right")
        child.expect("0 running")
    finally:
        server.stop()


def test_it_needs_a_terminal(server):
    done = subprocess.run(
        [sys.executable, *COMMAND, "--url", server.url],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "needs a terminal" in done.stderr


def iteration(begin_s, decoding=(), gaps_s=(), spans=(), target_s=0.1):
    return {
        "begin_s": begin_s,
        "took_s": 0.1,
        "decode_s": 0.1 if decoding else None,
        "decoding": decoding,
        "gaps_s": gaps_s,
        "spans": spans,
        "target_s": target_s,
    }


def span(start, end, *, shared=False):
    return {
        "request_id": "b",
        "start": start,
        "end": end,
        "shared": shared,
        "seconds": 0.0 if shared else 0.05,
    }


@pytest.fixture
def watched():
    watched = Watched("it")
    opened = [{"id": name, "prompt_tokens": 90} for name in "ab"]
    engine = {
        "running": 2,
        "waiting": 0,
        "itl": {"target_s": 0.1},
        "bank_bytes": 3000,
        "kv_running_bytes": 1000,
        "kv_limit_bytes": 4000,
    }
    watched.take({"type": "state", "now_s": 100.0, "engine": engine, "open": opened})
    return watched


def told(watched, *iterations):
    event = {"type": "iterations", "now_s": 101.0, "iterations": iterations, "missed": 0}
    watched.take(event)
    return watched.streams


def test_streams_add_up(watched):
    assert {stream.state for stream in watched.streams.values()} == {"waiting"}
    streams = told(
        watched,
        iteration(99.0, ["a"], [None], [span(30, 45, shared=True)]),
        iteration(99.5, ["a"], [0.08], [span(45, 60)]),
        iteration(100.0, ["a"], [0.3]),
    )
    assert streams["a"].state == "answering"
    assert [late for *_, late in streams["a"].gaps] == [False, True]
    assert (streams["b"].state, streams["b"].cached_tokens) == ("reading 66 %", 30)
    answered, read = watched.rates()
    assert (answered, read) == (3 / 5, 30 / 5)


def test_old_ones_are_forgotten(watched):
    told(watched, iteration(99.0, ["a"], [0.05]))
    watched.take({"type": "requests", "now_s": 140.0, "requests": []})
    assert watched.streams == {}
    assert not watched.iterations


@pytest.mark.parametrize("size", [(20, 5), (80, 24), (200, 60)])
def test_it_can_be_drawn_in_any_terminal(watched, size):
    from rich.console import Console

    told(watched, iteration(99.0, ["a"], [0.05], [span(0, 90)]))
    console = Console(width=size[0], height=size[1], record=True, quiet=False)
    with console.capture() as captured:
        console.print(draw(watched, *size))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= size[0]
    if size[1] > 10:
        assert len(lines) <= size[1]
