"""Every field of every request, and what becomes of it, as rows of one table.

Read off the models of the bodies and their tables, so that it cannot say anything else
than the server does. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from mtplx.server.chat_body import ChatBody
from mtplx.server.completion_body import CompletionBody
from mtplx.server.messages import CountTokensBody, MessagesBody
from mtplx.server.requests import JsonObject
from mtplx.server.responses_api.body import ResponseBody

BODIES: dict[str, type[JsonObject]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
}


class FieldRow(NamedTuple):
    """One field of one API.

    Attributes:
        api: The route's path.
        field: Path in the body; ``[]`` stands for each item of a list.
        state: What becomes of it.
        reason: What it means, why it is ignored, or what of it is accepted.
    """

    api: str
    field: str
    state: Literal["honoured", "ignored", "refused"]
    reason: str


def field_rows() -> Iterator[FieldRow]:
    """Yield the rows, by API and in the order of its fields. A field that several kinds
    of one item have is told once for each state."""
    told: set[tuple[str, ...]] = set()
    for api, body in BODIES.items():
        for row in _rows(api, body, ""):
            if (key := row[:3]) not in told:
                told.add(key)
                yield row


def _rows(api: str, model: type[JsonObject], prefix: str) -> Iterator[FieldRow]:
    for name, declared in model.model_fields.items():
        path = prefix + (declared.alias or name)
        yield FieldRow(api, path, "honoured", declared.description or "")
        for nested, is_list in _objects(declared.annotation):
            yield from _rows(api, nested, f"{path}[]." if is_list else f"{path}.")
    for name, reason in model.table.ignored.items():
        yield FieldRow(api, prefix + name, "ignored", reason)
    for name, accepted in model.table.refused.items():
        yield FieldRow(api, prefix + name, "refused", _advice(accepted))


def _objects(
    annotation: Any, is_list: bool = False
) -> Iterator[tuple[type[JsonObject], bool]]:
    """The JSON objects that a value of this type may be, or be a list of."""
    if isinstance(annotation, type) and issubclass(annotation, JsonObject):
        yield annotation, is_list
    for argument in get_args(annotation):
        yield from _objects(
            argument, is_list or getattr(annotation, "__origin__", None) is list
        )


def _advice(accepted: tuple[Any, ...]) -> str:
    if not accepted:
        return "not supported"
    return f"only {' or '.join(json.dumps(each) for each in accepted)} is accepted"
