"""Pieces that the bodies of this API are made of. Pure; any thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel

from mtplx.server.fields import UNSUPPORTED, field_error, shown
from mtplx.server.requests import INVALID


def variants(
    what: str,
    models: Mapping[str, type[BaseModel]],
    untyped: Callable[[Mapping[str, Any]], str | None] = lambda _: None,
) -> Callable[[Any], Any]:
    """Return a validator that picks the model by the object's ``type``.

    Pydantic's own unions would put the choice into the path of an error.

    Args:
        what: What the objects are, for errors: "input item", say.
        models: ``type`` -> model.
        untyped: Tells the type of an object that does not say it.
    """

    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            raise field_error(
                INVALID, f"Each {what} must be an object, not {shown(value)}."
            )
        kind = value.get("type") or untyped(value)
        if not isinstance(kind, str):
            raise field_error(INVALID, f"Each {what} must have a `type`.", "type")
        if kind not in models:
            raise field_error(
                UNSUPPORTED,
                f"A {what} of type {shown(kind)} is not supported; "
                f"use {' or '.join(models)}.",
                "type",
            )
        return models[kind].model_validate(value)

    return validate


def is_json_object(text: str) -> bool:
    """Whether ``text`` is one JSON object, complete."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def arguments_text(value: str) -> str:
    """Return the arguments of a call, which must be a JSON object as text."""
    if not is_json_object(value):
        raise field_error(
            INVALID, f"`arguments` must be a JSON object as text, not {shown(value)}."
        )
    return value
