"""One live server for the whole folder: each test is also the "next request" of the
one before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from mtplx.config import read_configuration
from mtplx.server.app import build_app
from mtplx.server.run import HttpServer, reserve
from tests.server.fakes import INFO, FakeEngine, FakeTokenizer

MAX_BODY_BYTES = 64 * 1024


class Server:
    """The running server with these settings, and the fakes behind it."""

    def __init__(self, engine: FakeEngine | None = None, **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.tokenizer = FakeTokenizer()
        configuration = read_configuration(
            {"max_body_bytes": MAX_BODY_BYTES, **settings}, environment={"HOME": "/nowhere"}
        )
        self.app = build_app(
            engine=self.engine,
            tokenizer=self.tokenizer,
            info=INFO,
            configuration=configuration,
        )
        started = threading.Event()
        self._http = HttpServer(
            self.app, reserve("127.0.0.1", 0), on_started=lambda url: started.set()
        )
        self.url = self._http.url
        self._thread = threading.Thread(target=self._http.run, daemon=True)
        self._thread.start()
        assert started.wait(10)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> None:
        self._http.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.engine.close()


@pytest.fixture(scope="session")
def running() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    running.engine.reset()
    running.tokenizer.reset()
    yield running
    running.engine.open_gate()
    running.engine.wait_idle()


@pytest.fixture
def engine(server: Server) -> FakeEngine:
    return server.engine


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as client:
        yield client


@pytest.fixture
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
