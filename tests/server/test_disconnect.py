"""A client that goes away stops its work, whatever it asked for."""

from __future__ import annotations

import gc
import json
import socket

import httpx
import pytest
from openai import OpenAI

from mtplx.server.handle import Generation
from mtplx.types import Finished
from tests.server.conftest import INFO, Server
from tests.server.fakes import FakeEngine

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]


def send_raw(server: Server, body: dict[str, object]) -> socket.socket:
    """Send a request on a bare socket and return it, the answer unread."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(head.encode() + payload)
    return client


def reasons(engine: FakeEngine) -> list[str]:
    return [end.reason for end in engine.ended.values() if isinstance(end, Finished)]


def settle(server: Server, http: httpx.Client) -> None:
    """Let the event loop turn until it has closed what has ended."""
    for _ in range(100):
        if len(server.app.state.generations) == 0:
            return
        http.get("/health")
    raise AssertionError("a generation is still open")


@pytest.mark.parametrize("stream", [False, True])
def test_cancelled_before_the_first_token(
    server: Server, http: httpx.Client, stream: bool
) -> None:
    engine = server.engine
    engine.gate.clear()
    client = send_raw(server, {"messages": USER, "stream": stream})
    engine.wait_submitted()
    client.close()
    engine.wait_idle()
    assert reasons(engine) == ["cancelled"]
    settle(server, http)
    engine.open_gate()
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


def test_cancelled_in_the_middle_of_a_stream(
    server: Server, openai: OpenAI, http: httpx.Client
) -> None:
    server.engine.gate.clear()
    stream = openai.chat.completions.create(model=INFO.name, messages=USER, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    stream.close()
    server.engine.wait_idle()
    assert reasons(server.engine) == ["cancelled"]
    settle(server, http)


def test_a_waiting_request_is_cancelled_too(server: Server, http: httpx.Client) -> None:
    engine = server.engine
    engine.gate.clear()
    first = send_raw(server, {"messages": USER})
    second = send_raw(server, {"messages": USER, "stream": True})
    engine.wait_submitted(2)
    second.close()
    first.close()
    engine.wait_idle()
    assert reasons(engine) == ["cancelled", "cancelled"]
    settle(server, http)


def generations_in_memory() -> int:
    gc.collect()
    return sum(type(each) is Generation for each in gc.get_objects())


def test_fifty_dropped_streams_leave_nothing(server: Server, http: httpx.Client) -> None:
    engine = server.engine
    before = generations_in_memory()
    for n in range(50):
        engine.gate.clear()
        client = send_raw(server, {"messages": USER, "stream": True})
        assert client.recv(64)
        client.close()
        engine.wait(lambda n=n: len(engine.ended) == n + 1)  # type: ignore[misc]
    assert reasons(engine) == ["cancelled"] * 50
    settle(server, http)
    for _ in range(100):  # the threads are a moment later than what they tell
        http.get("/health")
        if (left := generations_in_memory()) <= before:
            break
    assert left <= before
    engine.open_gate()
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


def test_a_body_that_never_arrives(server: Server, http: httpx.Client) -> None:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    client.sendall(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 100\r\n\r\n{".encode()
    )
    client.close()
    assert http.post(CHAT, json={"messages": USER}).status_code == 200
    assert len(server.engine.requests) == 1


def test_what_is_not_http_gets_a_400(server: Server, http: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert client.recv(64).startswith(b"HTTP/1.1 400")
    assert http.get("/health").status_code == 200
