"""Reading a request body: size, JSON, and the model it must match.

The route reads its own body, so that a body above the limit is refused while it
arrives, at most the limit is ever held, and each error names its field. What is left
of a refused body is discarded by the HTTP layer; the connection stays usable.
Runs on the event loop.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from mtplx.errors import InvalidRequestError, RequestTooLargeError, UnsupportedFieldError
from mtplx.server.fields import UNSUPPORTED, shown

Body = TypeVar("Body", bound=BaseModel)

# How pydantic's sentences begin; ours begin with the field.
_SUBJECT = re.compile(r"^(Input|List|String) should")


async def read_body(request: Request, model: type[Body], *, max_bytes: int) -> Body:
    """Read and validate the JSON body of ``request``.

    Raises:
        RequestTooLargeError: The body is longer than ``max_bytes``.
        InvalidRequestError: It is not JSON, not an object, or does not match ``model``.
        ClientDisconnect: The client went away.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site may post anything but this without asking first.
        raise InvalidRequestError(
            "The body must be JSON: send the header `Content-Type: application/json`.",
            code="unsupported_media_type",
        )
    return parse_body(await _read_bytes(request, max_bytes), model)


def parse_body(raw: bytes, model: type[Body]) -> Body:
    """Validate ``raw`` as JSON that matches ``model``; raises as ``read_body`` does."""
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The body is not valid JSON in UTF-8: {error}.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"The body must be a JSON object, not {shown(value)}.", code="invalid_type"
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error) from None


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(max_bytes: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"The body is larger than {max_bytes:,} bytes. "
        "Send less, or start the server with a larger --max-body-bytes."
    )


def _first_error(error: ValidationError) -> InvalidRequestError:
    details = error.errors(include_url=False)[0]
    context = details.get("ctx", {})
    named = (context["field"],) if context.get("field") else ()
    path = _path((*details["loc"], *named))
    code = details["type"]
    if code == UNSUPPORTED:
        return UnsupportedFieldError(details["msg"], param=path)
    if "sentence" in context:
        return InvalidRequestError(details["msg"], param=path, code=code)
    if code == "missing":
        return InvalidRequestError(
            f"`{path}` is required.", param=path, code="missing_required_parameter"
        )
    return InvalidRequestError(
        _sentence(path, details),
        param=path,
        code="invalid_type" if code.endswith("_type") else None,
    )


def _sentence(path: str, details: ErrorDetails) -> str:
    rule = details["msg"].removesuffix(".").replace(" after validation", "")
    rule = _SUBJECT.sub(f"`{path}` should", rule)
    value: Any = details["input"]
    if isinstance(value, list):
        return f"{rule}."
    return f"{rule}, not {shown(value)}."


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
