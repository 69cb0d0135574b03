"""``GET /v1/models`` and ``GET /health``: what is served, and how it is.

Both read values that need no engine thread, so they answer during a prefill.
"""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus

from mtplx import __version__
from mtplx.server.responses import Health, Model, ModelList
from mtplx.server.service import Service


def model_list(service: Service) -> ModelList:
    """Return the served models, which are one."""
    return {"object": "list", "data": [_model(service)]}


def model(service: Service, name: str) -> Model:
    """Return the model of that name. Raises ``ModelNotFoundError``."""
    service.check_model(name)
    return _model(service)


def health(service: Service) -> tuple[HTTPStatus, Health]:
    """Return the state of the server: 200, or 503 when the engine is not alive."""
    status = service.engine.status()
    values = service.configuration.settings.model_dump(mode="json")
    sources = service.configuration.sources
    return (
        HTTPStatus.OK if status.alive else HTTPStatus.SERVICE_UNAVAILABLE,
        {
            "status": "ok" if status.alive else "unavailable",
            "version": __version__,
            "model": asdict(service.info),
            "engine": asdict(status),
            "settings": {
                name: {"value": value, "source": sources[name]}
                for name, value in values.items()
            },
        },
    )


def _model(service: Service) -> Model:
    info = service.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "mtplx",
        "context_length": info.context_length,
        "max_model_len": info.context_length,
    }
