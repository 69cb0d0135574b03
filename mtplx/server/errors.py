"""The one table from our errors to HTTP, and OpenAI's shape of an error.

Every class of ``mtplx.errors`` has a row; a test holds it. Pure; any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from http import HTTPStatus

from typing_extensions import TypedDict

from mtplx import errors


@dataclass(frozen=True)
class Row:
    """What a client sees of an error class. ``code`` is the default one."""

    status: int
    type: str
    code: str | None


_BAD_REQUEST = "invalid_request_error"
_SERVER = "server_error"

TABLE: dict[type[errors.MtplxError], Row] = {
    errors.MtplxError: Row(500, _SERVER, "internal_error"),
    errors.ConfigError: Row(500, _SERVER, "configuration_error"),
    errors.ModelLoadError: Row(500, _SERVER, "model_load_error"),
    errors.RequestError: Row(400, _BAD_REQUEST, None),
    errors.InvalidRequestError: Row(400, _BAD_REQUEST, "invalid_value"),
    errors.UnsupportedFieldError: Row(400, _BAD_REQUEST, "unsupported_parameter"),
    errors.ContextLengthError: Row(400, _BAD_REQUEST, "context_length_exceeded"),
    errors.RequestTooLargeError: Row(413, _BAD_REQUEST, "request_too_large"),
    errors.ModelNotFoundError: Row(404, _BAD_REQUEST, "model_not_found"),
    errors.QueueFullError: Row(429, "rate_limit_error", "queue_full"),
    errors.EngineUnavailableError: Row(503, _SERVER, "engine_unavailable"),
    errors.DeadlineExceededError: Row(408, "timeout_error", "deadline_exceeded"),
    errors.GenerationError: Row(500, _SERVER, "generation_failed"),
}

# What a client is told of a bug. The log has the traceback.
BUG = errors.MtplxError("The server failed on this request. Its log has the details.")

STOPPING = errors.EngineUnavailableError(
    "The server is stopping; send the request again when it is back."
)


class ErrorDetails(TypedDict):
    """What went wrong. ``param`` is the path of the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(TypedDict):
    """Body of every answer that is not a success."""

    error: ErrorDetails


def row_of(error: errors.MtplxError) -> Row:
    """Return the row of the nearest class in the table."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: errors.MtplxError) -> ErrorBody:
    """Return the wire shape of ``error``."""
    row = row_of(error)
    return {
        "error": {
            "message": str(error),
            "type": row.type,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None) or row.code,
        }
    }


def error_headers(error: errors.MtplxError) -> dict[str, str]:
    """Return the headers that belong to ``error``."""
    if isinstance(error, errors.QueueFullError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def http_error_body(status: int, message: str, code: str) -> ErrorBody:
    """Return the wire shape of an error of HTTP itself, a wrong path say."""
    kind = _SERVER if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _BAD_REQUEST
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
