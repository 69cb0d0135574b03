"""The application, called without a socket and with any settings."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from mtplx.config import read_configuration
from mtplx.server.app import build_app
from mtplx.server.interfaces import EngineClient
from tests.server.conftest import INFO
from tests.server.fakes import FakeTokenizer

LOCAL = "http://127.0.0.1:8000"


def small_app(engine: EngineClient, **flags: Any) -> FastAPI:
    """Return the application over ``engine``, with these settings."""
    return build_app(
        engine=engine,
        tokenizer=FakeTokenizer(),
        info=INFO,
        configuration=read_configuration(flags, environment={"HOME": "/nowhere"}),
    )


def small_client(engine: EngineClient, **flags: Any) -> TestClient:
    """Return a client of ``small_app``, for which the server is ``LOCAL``."""
    return TestClient(small_app(engine, **flags), base_url=LOCAL)
