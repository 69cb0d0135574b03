"""The OpenAPI document: what FastAPI cannot see of the routes.

The routes read their bodies and write their answers themselves, so the document is told
here of bodies, events of streams, errors and keys. It is OpenAPI 3.2, the first that has
a word for the events of a stream (``itemSchema``). Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from mtplx.server.errors import TABLE, ErrorBody

VERSION = "3.2.0"

_SCHEMAS = "#/components/schemas/"
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# FastAPI's answer to what it validates itself, which is nothing here.
_NEVER_SENT = ("HTTPValidationError", "ValidationError")


def failures(
    statuses: Iterable[int] = (401, 403, 404, 500, 503), error: Any = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route that may fail so, by default one that only
    looks something up. ``error`` is the typed dict of the body."""
    return {status: {"model": error} for status in statuses}


def events_of(shape: Any) -> dict[str, Any]:
    """Return the success of a route that streams these events and nothing else. The
    shape is to be among those of ``Application``."""
    return {"content": {"text/event-stream": {"itemSchema": _event(_any_of(shape), False)}}}


def describe(
    body: type[BaseModel],
    answer: Any,
    *others: type[BaseModel],
    events: Any = None,
    done: bool = False,
    error: Any = ErrorBody,
    links: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what ``app.post`` is to be told of a route with a body.

    Args:
        body: The model of its request; to be among the shapes of ``Application``.
        answer: The typed dict of its answer, where that is not streamed.
        others: Models that the request may match instead; among those shapes too.
        events: The typed dict of each event of a streamed answer, the last of which may
            be an error instead; among those shapes or an ``answer``. None: no streams.
        done: The stream ends with OpenAI's ``[DONE]``.
        error: The typed dict of the body of a failure.
        links: What the answer can be used for: name -> OpenAPI's link object.
    """
    statuses = sorted({row.status for row in TABLE.values()})
    success: dict[str, Any] = {}
    if events is not None:
        stream = {"itemSchema": _event(_any_of(events, error), done)}
        success["content"] = {"text/event-stream": stream}
    if links is not None:
        success["links"] = links
    content = {"application/json": {"schema": _any_of(body, *others)}}
    return {
        "response_model": answer,
        "responses": failures(statuses, error) | {200: success},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


class Application(FastAPI):
    """FastAPI whose document also describes what the routes read and write themselves.

    Attributes:
        shapes: Bodies of requests, and events of streams that are no answers.
        keyed: A key is asked for.
    """

    shapes: tuple[Any, ...] = ()
    keyed: bool = False

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is not None:
            return self.openapi_schema
        document = super().openapi()
        document["openapi"] = VERSION
        components = document["components"]
        components["securitySchemes"] = _KEY_SCHEMES
        for name in _NEVER_SENT:
            components["schemas"].pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        if self.keyed:
            ways: list[dict[str, list[str]]] = [{name: []} for name in _KEY_SCHEMES]
            document["security"] = ways
            # It answers anybody, with the status alone.
            document["paths"]["/health"]["get"]["security"] = [{}, *ways]
        self._add_shapes(components["schemas"])
        return document

    def _add_shapes(self, schemas: dict[str, Any]) -> None:
        _, told = TypeAdapter.json_schemas(
            [(shape, "validation", TypeAdapter(shape)) for shape in self.shapes],
            ref_template=_SCHEMAS + "{model}",
        )
        for name, schema in told["$defs"].items():
            assert schemas.get(name, schema) == schema, f"two shapes are called {name}"
            schemas[name] = schema


def _any_of(*shapes: Any) -> dict[str, Any]:
    refs = [{"$ref": _SCHEMAS + shape.__name__} for shape in shapes]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _event(data: dict[str, Any], done: bool) -> dict[str, Any]:
    """Return the schema of a server-sent event with this object as its data."""
    text = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": data,
    }
    return {
        "type": "object",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": "[DONE]"}, text]} if done else text,
        },
        "required": ["data"],
    }
