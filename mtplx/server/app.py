"""The application: routes, error handlers, and the OpenAPI document.

``build_app`` takes everything from outside and reads no environment; ``run.py`` puts
the application on a port. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from mtplx import __version__
from mtplx.config import Configuration
from mtplx.errors import MtplxError
from mtplx.server import about
from mtplx.server.access import AccessMiddleware
from mtplx.server.chat import create_chat_completion
from mtplx.server.completions import create_completion
from mtplx.server.errors import (
    TABLE,
    ErrorBody,
    error_body,
    error_headers,
    http_error_body,
    row_of,
)
from mtplx.server.handle import Generations
from mtplx.server.interfaces import EngineClient, PromptRenderer
from mtplx.server.requests import ChatBody, CompletionBody
from mtplx.server.responses import ChatCompletion, Health, ModelList, TextCompletion, dump
from mtplx.server.responses import Model as ModelShape
from mtplx.server.service import Service
from mtplx.types import ModelInfo

_SCHEMAS = "#/components/schemas/"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in sorted({row.status for row in TABLE.values()})
}


def build_app(
    *,
    engine: EngineClient,
    tokenizer: PromptRenderer,
    info: ModelInfo,
    configuration: Configuration,
) -> FastAPI:
    """Return the application that serves one model.

    Args:
        engine: Runs the requests. Its life is the caller's business.
        tokenizer: Renders prompts, off the event loop.
        info: What clients are told about the model.
        configuration: The effective settings, shown in ``/health``.
    """
    service = Service(engine, tokenizer, info, configuration, Generations(engine))
    # By default FastAPI exports traces when the environment of the process says so.
    app = _Application(
        title="MTPLX", version=__version__, telemetry={"auto_configure": False}
    )
    app.state.generations = service.generations
    app.add_middleware(AccessMiddleware)
    app.add_exception_handler(MtplxError, _on_mtplx_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_generating_routes(app, service)
    _add_reading_routes(app, service)
    return app


def _add_generating_routes(app: FastAPI, service: Service) -> None:
    @app.post(
        "/v1/chat/completions",
        response_model=ChatCompletion,
        responses=_ERRORS,
        openapi_extra=_takes("ChatBody"),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a chat; with `stream` as server-sent events."""
        return await create_chat_completion(service, request)

    @app.post(
        "/v1/completions",
        response_model=TextCompletion,
        responses=_ERRORS,
        openapi_extra=_takes("CompletionBody"),
    )
    async def completions(request: Request) -> Response:
        """Continue a text; with `stream` as server-sent events."""
        return await create_completion(service, request)


def _add_reading_routes(app: FastAPI, service: Service) -> None:
    async def models() -> Response:
        """List the served models."""
        return _json(about.model_list(service))

    async def model(name: str) -> Response:
        """Describe one model."""
        return _json(about.model(service, name))

    async def health() -> Response:
        """Tell the state of the server, with its settings and where each came from."""
        status, body = about.health(service)
        return _json(body, status)

    _read(app, "/v1/models", models, ModelList)
    _read(app, "/v1/models/{name:path}", model, ModelShape, {404: {"model": ErrorBody}})
    _read(app, "/health", health, Health, {503: {"model": Health}})


def _read(
    app: FastAPI,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    shape: Any,
    others: dict[int | str, dict[str, Any]] | None = None,
) -> None:
    app.get(path, response_model=shape, responses=others)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)


async def _on_mtplx_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MtplxError)
    return _json(error_body(error), row_of(error).status, error_headers(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path[:200]}"
    message, code = str(error.detail), "http_error"
    if error.status_code == HTTPStatus.NOT_FOUND:
        message, code = f"Unknown path: {where}. See /openapi.json.", "unknown_url"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message, code = f"Wrong method: {where}. See /openapi.json.", "method_not_allowed"
    body = http_error_body(error.status_code, message, code)
    return _json(body, error.status_code, error.headers)


def _json(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(dump(body), status, headers, media_type="application/json")


def _takes(schema: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + schema}}}
    return {"requestBody": {"required": True, "content": content}}


class _Application(FastAPI):
    """FastAPI whose document also describes the bodies that the routes read."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _, bodies = models_json_schema(
                [(ChatBody, "validation"), (CompletionBody, "validation")],
                ref_template=_SCHEMAS + "{model}",
            )
            document["components"]["schemas"].update(bodies["$defs"])
        return super().openapi()
