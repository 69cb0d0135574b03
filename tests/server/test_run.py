"""On a port and off it again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from mtplx.errors import ConfigError
from mtplx.server.run import HttpServer, reserve
from tests.server.conftest import Server
from tests.server.fakes import FakeEngine
from tests.server.small_app import small_app

USER = [{"role": "user", "content": "Hello"}]
PROGRAM = """
import sys
from tests.server.conftest import *
engine = FakeEngine()
engine.gate.clear()
app = build_app(engine=engine, tokenizer=FakeTokenizer(), info=INFO,
                configuration=read_configuration(environment={"HOME": "/nowhere"}))
if "stuck" in sys.argv:
    engine.cancel = lambda request_id: None
from mtplx.server.run import HttpServer, reserve
HttpServer(app, reserve("127.0.0.1", 0),
           on_started=lambda url: print(url, flush=True)).run()
print("closed", flush=True)
"""


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"Port {port} on 127.0.0.1 is taken"
        ) as error:
            reserve("127.0.0.1", port)
    assert "\n" not in str(error.value)


def test_a_port_that_is_taken_while_the_model_loads(server: Server) -> None:
    with reserve("127.0.0.1", 0) as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(port.getsockname())
        other.listen()
        with pytest.raises(ConfigError, match="is taken"):
            HttpServer(server.app, port)


def test_nobody_connects_before_it_serves() -> None:
    with reserve("127.0.0.1", 0) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(port.getsockname())


def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigError, match="Cannot listen on 192"):
        reserve("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["no such host", "a..b", "x" * 70])
def test_a_host_that_does_not_exist(host: str) -> None:
    with pytest.raises(ConfigError, match="Check --host"):
        reserve(host, 0)


@pytest.fixture
def impatient() -> Iterator[tuple[str, int]]:
    """The address of a server that does not wait long for headers."""
    started = threading.Event()
    engine = FakeEngine()
    http = HttpServer(
        small_app(engine),
        reserve("127.0.0.1", 0),
        on_started=lambda url: started.set(),
        header_timeout_s=0.5,
    )
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    assert started.wait(10)
    yield "127.0.0.1", int(http.url.rpartition(":")[2])
    http.stop()
    thread.join(10)
    engine.close()


HEALTH = b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(("before", "sent"), [(0, b""), (0, HEALTH[:-2]), (1, HEALTH[:9])])
def test_headers_are_not_waited_for_forever(
    impatient: tuple[str, int], before: int, sent: bytes
) -> None:
    with socket.create_connection(impatient, timeout=10) as client:
        for _ in range(before):
            client.sendall(HEALTH)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(sent)
        while client.recv(1 << 16):
            pass


def test_a_connection_that_has_asked_outlives_the_wait_for_headers(
    impatient: tuple[str, int],
) -> None:
    with (
        socket.create_connection(impatient, timeout=10) as client,
        socket.create_connection(impatient, timeout=10) as later,
    ):
        client.sendall(HEALTH)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert later.recv(1) == b""  # the wait that began later is over
        client.sendall(HEALTH)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_headers_have_a_limit(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * 100_000)
        assert client.recv(64).startswith(b"HTTP/1.1 400")


def test_stopped_server_ends_streams_with_an_error() -> None:
    server = Server()
    server.engine.gate.clear()
    body = {"messages": USER, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, trust_env=False
    ) as answer:
        server.engine.wait_submitted()
        server.stop()
        *_, last, _ = answer.read().decode().split("\n\n")
    assert '"code":"engine_unavailable"' in last
    assert len(server.engine.ended) == 1


@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGTERM, "obedient"), (signal.SIGINT, "stuck")]
)
def test_a_signal_ends_the_server_cleanly(number: signal.Signals, mode: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        body = {"messages": USER, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, trust_env=False, timeout=10
        ) as answer:
            events = answer.iter_text()
            next(events)
            process.send_signal(number)
            rest = "".join(events)
            out, err = process.communicate(timeout=20)
    assert '"code":"engine_unavailable"' in rest
    assert (out, err, process.returncode) == ("closed\n", "", 0)
