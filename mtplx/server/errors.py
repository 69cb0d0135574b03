"""The one table from our errors to HTTP, and the two shapes of an error.

Every class of ``mtplx.errors`` has a row; a test holds it. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

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
    errors.KVBudgetError: Row(400, _BAD_REQUEST, "kv_budget_exceeded"),
    errors.RequestTooLargeError: Row(413, _BAD_REQUEST, "request_too_large"),
    errors.AuthenticationError: Row(401, _BAD_REQUEST, "invalid_api_key"),
    errors.OriginRefusedError: Row(403, _BAD_REQUEST, "origin_refused"),
    errors.ResponseNotFoundError: Row(404, _BAD_REQUEST, "response_not_found"),
    errors.ModelNotFoundError: Row(404, _BAD_REQUEST, "model_not_found"),
    errors.QueueFullError: Row(429, "rate_limit_error", "queue_full"),
    errors.EngineUnavailableError: Row(503, _SERVER, "engine_unavailable"),
    errors.DeadlineExceededError: Row(408, "timeout_error", "deadline_exceeded"),
    errors.GenerationError: Row(500, _SERVER, "generation_failed"),
}

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
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


class AnthropicErrorCode(TypedDict):
    """The same word for the case as ``ErrorDetails`` has."""

    error_code: str | None


class AnthropicErrorDetails(TypedDict):
    """What went wrong, as Anthropic's clients read it."""

    type: str
    message: str
    details: AnthropicErrorCode


class AnthropicErrorBody(TypedDict):
    """Body of every answer of ``/v1/messages`` that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorDetails


def row_of(error: errors.MtplxError) -> Row:
    """Return the row of the nearest class in the table."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_body(error: errors.MtplxError) -> ErrorBody:
    """Return the wire shape of ``error``."""
    return {
        "error": {
            "message": str(error),
            "type": row_of(error).type,
            "param": getattr(error, "param", None),
            "code": _code(error),
        }
    }


def error_body_for(path: str, error: errors.MtplxError) -> Mapping[str, Any]:
    """Return ``error`` in the shape of the API that ``path`` belongs to."""
    if _is_anthropic(path):
        return anthropic_error_body(row_of(error).status, str(error), _code(error))
    return error_body(error)


def anthropic_error_body(status: int, message: str, code: str | None) -> AnthropicErrorBody:
    """Return Anthropic's shape of an error, whose type follows from the status."""
    default = "invalid_request_error" if status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(status, default)
    details: AnthropicErrorCode = {"error_code": code}
    return {
        "type": "error",
        "error": {"type": kind, "message": message, "details": details},
    }


def error_headers(error: errors.MtplxError) -> dict[str, str]:
    """Return the headers that belong to ``error``."""
    if isinstance(error, errors.QueueFullError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, errors.AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def http_error_body_for(
    path: str, status: int, message: str, code: str
) -> Mapping[str, Any]:
    """Return an error of HTTP itself, a wrong method say, in the shape of the API that
    ``path`` belongs to."""
    if _is_anthropic(path):
        return anthropic_error_body(status, message, code)
    kind = _SERVER if status >= HTTPStatus.INTERNAL_SERVER_ERROR else _BAD_REQUEST
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _code(error: errors.MtplxError) -> str | None:
    return getattr(error, "code", None) or row_of(error).code


def _is_anthropic(path: str) -> bool:
    return path == "/v1/messages" or path.startswith("/v1/messages/")
