"""Reading a request body: size, JSON, and the model it must match.

The route reads its own body, so that a body above the limit is refused while it
arrives, at most the limit is ever held, a client that sends it too slowly is not waited
for, and each error names its field. What is left of a refused body is discarded by the
HTTP layer; the connection stays usable.
Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from mtplx.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RequestTooLargeError,
    UnsupportedFieldError,
)
from mtplx.server.fields import UNSUPPORTED, shown

Body = TypeVar("Body", bound=BaseModel)

BODY_TIMEOUT_S = 120.0
"""The whole body must arrive in this time; 32 MiB then need 2.2 Mbit/s."""

# How pydantic's sentences begin; ours begin with the field.
_SUBJECT = re.compile(r"^(Input|List|String) should")


async def read_body(
    request: Request,
    model: type[Body],
    *,
    max_bytes: int,
    timeout_s: float = BODY_TIMEOUT_S,
) -> Body:
    """Read and validate the JSON body of ``request``.

    Raises as ``read_object`` and ``validate``.
    """
    return validate(
        await read_object(request, max_bytes=max_bytes, timeout_s=timeout_s), model
    )


async def read_object(
    request: Request, *, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> dict[str, Any]:
    """Read the body of ``request``, which must be a JSON object.

    Raises:
        RequestTooLargeError: It is longer than ``max_bytes``.
        DeadlineExceededError: It was not complete after ``timeout_s``.
        InvalidRequestError: It is not JSON, nested too deeply, or not an object.
        ClientDisconnect: The client went away.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # A page of another site may post anything but this without asking first.
        raise InvalidRequestError(
            "The body must be JSON: send the header `Content-Type: application/json`.",
            code="unsupported_media_type",
        )
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _read_bytes(request, max_bytes)
    except TimeoutError:
        raise DeadlineExceededError(
            f"The body did not arrive within {timeout_s:g} seconds. Send less, or faster."
        ) from None
    return parse_object(raw)


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return ``raw`` as a JSON object; raises as ``read_object`` does."""
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
    return value


def validate(value: dict[str, Any], model: type[Body]) -> Body:
    """Return ``value`` as a ``model``.

    Raises:
        InvalidRequestError: It does not match; the error names the field.
    """
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
