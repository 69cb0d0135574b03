"""The routes over the fakes of ``tests/server/fakes.py``, driven by Anthropic's own SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx2
import pytest
from anthropic import AsyncAnthropic
from fastapi import FastAPI, Request, Response

from mtplx.config import read_configuration
from mtplx.errors import MtplxError
from mtplx.server.access import AccessMiddleware, error_answer
from mtplx.server.handle import Generations
from mtplx.server.messages import add_routes
from mtplx.server.names import ModelNames
from mtplx.server.service import Service
from tests.server.conftest import INFO as SMALL
from tests.server.fakes import FakeEngine, FakeTokenizer

INFO = replace(SMALL, context_length=2000)


class Api:
    """An application with Anthropic's routes alone, and what it works on."""

    def __init__(self, **settings: object) -> None:
        self.engine = FakeEngine()
        self.tokenizer = FakeTokenizer()
        configuration = read_configuration(settings, environment={"HOME": "/nowhere"})
        self.service = Service(
            self.engine,
            self.tokenizer,
            INFO,
            configuration,
            Generations(self.engine),
            ModelNames.read([INFO.name], ""),
        )
        self.app = self.application()

    def application(self) -> FastAPI:
        app = FastAPI(telemetry={"auto_configure": False})
        app.add_middleware(AccessMiddleware)
        app.add_exception_handler(MtplxError, _on_error)
        add_routes(app, self.service)
        return app

    @asynccontextmanager
    async def sdk(self, app: FastAPI | None = None) -> AsyncIterator[AsyncAnthropic]:
        transport = httpx2.ASGITransport(app or self.app)
        async with (
            httpx2.AsyncClient(transport=transport) as http,
            AsyncAnthropic(
                base_url="http://mtplx", api_key="any", http_client=http, max_retries=0
            ) as client,
        ):
            yield client


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MtplxError)
    return error_answer(request.scope, error)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    yield api
    api.engine.close()
