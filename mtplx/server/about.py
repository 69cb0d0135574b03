"""``GET /v1/models`` and ``GET /health``: what is served, and how it is.

Both read values that need no engine thread, so they answer during a prefill. Secrets are
never shown. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response

from mtplx import __version__
from mtplx.server.access import RequestRecord
from mtplx.server.openapi import failures
from mtplx.server.responses import Health, Model, ModelList, Setting, dump
from mtplx.server.service import Service

_SECRET_SETTINGS = frozenset({"api_key"})
_REDACTED = "(not shown)"


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes that only read, for GET and HEAD."""

    async def list_models() -> Response:
        """List the served models."""
        return _json(model_list(service))

    async def get_model(name: str) -> Response:
        """Describe one model."""
        return _json(model(service, name))

    async def get_health(request: Request) -> Response:
        """Tell the state of the server, with its settings and where each came from."""
        status, body = health(service, stranger=RequestRecord.of(request).stranger)
        return _json(body, status)

    _read(app, "/v1/models", list_models, ModelList, failures((401, 403, 500, 503)))
    _read(app, "/v1/models/{name:path}", get_model, Model, failures())
    health_failures = failures((403, 500)) | failures((503,), Health)
    _read(app, "/health", get_health, Health, health_failures)


def model_list(service: Service) -> ModelList:
    """Return the served models."""
    return {"object": "list", "data": [_model(service, n) for n in service.names.served]}


def model(service: Service, name: str) -> Model:
    """Return the model that ``name`` means. Raises ``ModelNotFoundError``."""
    return _model(service, service.names.resolve(name))


def health(service: Service, *, stranger: bool = False) -> tuple[HTTPStatus, Health]:
    """Return the state of the server: 200, or 503 when the engine is not alive.

    Args:
        service: What is served.
        stranger: Who asks has no key and should have one: only the status is told.
    """
    engine = service.engine.status()
    status = HTTPStatus.OK if engine.alive else HTTPStatus.SERVICE_UNAVAILABLE
    body: Health = {"status": "ok" if engine.alive else "unavailable"}
    if not stranger:
        body |= {
            "version": __version__,
            "model": asdict(service.info),
            "models": [asdict(info) for info in service.engine.loaded.values()],
            "engine": asdict(engine),
            "settings": _settings(service),
        }
    return status, body


def _settings(service: Service) -> dict[str, Setting]:
    values = service.configuration.settings.model_dump(mode="json")
    for name in _SECRET_SETTINGS:
        if values[name] is not None:
            values[name] = _REDACTED
    sources = service.configuration.sources
    return {name: {"value": values[name], "source": sources[name]} for name in values}


def _model(service: Service, name: str) -> Model:
    info = service.engine.loaded.get(name)
    told: Model = {
        "id": name,
        "object": "model",
        # When this server began to serve it.
        "created": service.info.created,
        "owned_by": "mtplx",
        "loaded": info is not None,
    }
    if info is not None:
        told["context_length"] = told["max_model_len"] = info.context_length
    return told


def _read(
    app: FastAPI,
    path: str,
    endpoint: Callable[..., Awaitable[Response]],
    shape: Any,
    others: dict[int | str, dict[str, Any]],
) -> None:
    app.get(path, response_model=shape, responses=others)(endpoint)
    app.head(path, include_in_schema=False)(endpoint)


def _json(body: Mapping[str, Any], status: int = HTTPStatus.OK) -> Response:
    return Response(dump(body), status, media_type="application/json")
