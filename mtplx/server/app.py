"""The application: which routes there are, and what every request passes through.

``build_app`` takes everything from outside and reads no environment; ``run.py`` puts
the application on a port. Runs on the event loop.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from mtplx import __version__
from mtplx.config import Configuration, Settings
from mtplx.errors import MtplxError
from mtplx.server import (
    about,
    chat,
    completions,
    live,
    messages,
    metrics,
    page,
    prefill,
    tokenize,
)
from mtplx.server.access import AccessMiddleware, RequestRecord, error_answer
from mtplx.server.auth import AuthMiddleware, read_keys
from mtplx.server.chat_body import ChatBody
from mtplx.server.chat_shapes import ChatCompletionChunk
from mtplx.server.completion_body import CompletionBody
from mtplx.server.errors import http_error_body_for
from mtplx.server.handle import Generations
from mtplx.server.interfaces import EngineClient, PromptRenderer
from mtplx.server.live_shapes import LiveEvent
from mtplx.server.metrics import Metrics
from mtplx.server.names import ModelNames
from mtplx.server.openapi import Application
from mtplx.server.origins import OriginMiddleware, read_origins
from mtplx.server.responses import json_response
from mtplx.server.responses_api import routes as responses_api
from mtplx.server.responses_api.body import ResponseBody
from mtplx.server.responses_api.shapes import ResponseEvent
from mtplx.server.service import Service
from mtplx.types import ModelInfo

ROUTES = (chat, completions, responses_api, messages, tokenize, prefill, about)
"""Modules with ``add_routes(app, service)``."""

BODIES = (
    ChatBody,
    CompletionBody,
    ResponseBody,
    messages.MessagesBody,
    messages.CountTokensBody,
    tokenize.TokenizeBody,
    tokenize.TokenizeChatBody,
    tokenize.DetokenizeBody,
)
"""What the routes read, for the OpenAPI document and the table of fields."""

EVENTS = (ChatCompletionChunk, ResponseEvent, messages.MessageEvent, LiveEvent)
"""What streams are made of, for the OpenAPI document."""


def build_app(
    *,
    engine: EngineClient,
    tokenizer: PromptRenderer,
    info: ModelInfo,
    configuration: Configuration,
) -> FastAPI:
    """Return the application that serves an engine's models.

    Args:
        engine: Runs the requests. Its life is the caller's business.
        tokenizer: Renders prompts for the first model, off the event loop.
        info: What clients are told about the first model.
        configuration: The effective settings, shown in ``/health``.

    Raises:
        ConfigError: The keys, the origins or the aliases cannot be used.
    """
    settings = configuration.settings
    keys = read_keys(settings)
    counted = Metrics(engine)
    recent = live.RecentRequests()
    service = Service(
        engine,
        tokenizer,
        info,
        configuration,
        Generations(engine),
        ModelNames.read(engine.names, settings.aliases, _arguments(info.name, settings)),
    )
    # FastAPI's pages of documentation load scripts from elsewhere, and by default it
    # exports traces when the environment of the process says so.
    app = Application(
        title="MTPLX",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        telemetry={"auto_configure": False},
        generate_unique_id_function=lambda route: route.name,
    )
    app.shapes = (*BODIES, *EVENTS)
    app.keyed = bool(len(keys))
    app.state.generations = service.generations
    # The last one added is the outermost.
    app.add_middleware(AuthMiddleware, keys=keys)
    app.add_middleware(
        OriginMiddleware,
        allowed=read_origins(settings),
        keyless=not len(keys),
        any_host=not settings.auth,
    )

    def on_end(method: str, route: str | None, record: RequestRecord) -> None:
        counted.observe(method, route, record)
        recent.observe(record)

    app.add_middleware(AccessMiddleware, on_end=on_end)
    app.add_exception_handler(MtplxError, _on_mtplx_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    for module in ROUTES:
        module.add_routes(app, service)
    metrics.add_routes(app, counted)
    live.add_routes(app, service, recent)
    page.add_routes(app)
    return app


def _arguments(first: str, settings: Settings) -> dict[str, str]:
    """Return what each model was asked for by, by its name."""
    return {name: source.model for name, source in settings.further_models().items()} | {
        first: settings.model
    }


async def _on_mtplx_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MtplxError)
    return error_answer(request.scope, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    message, code, headers = str(error.detail), "http_error", error.headers
    if error.status_code == HTTPStatus.NOT_FOUND:
        message, code = f"Unknown path: {where}. See /openapi.json.", "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"Wrong method: {where}. See /openapi.json.", "method_not_allowed"
        headers = {"Allow": ", ".join(_methods(request))}
    body = http_error_body_for(request.url.path, error.status_code, message, code)
    return json_response(body, error.status_code, headers)


def _methods(request: Request) -> list[str]:
    """Return the methods that the request's path has: each may be a route of its own."""
    path = request.scope["route"].path
    routes = [each for each in request.app.routes if getattr(each, "path", None) == path]
    return sorted({method for each in routes for method in each.methods})
