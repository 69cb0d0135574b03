"""The OpenAPI document: what FastAPI cannot see of the routes.

The routes read their bodies themselves (``body.py``), so the document is told of the
bodies here. Pure; any thread.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from mtplx.server.errors import TABLE, ErrorBody

_SCHEMAS = "#/components/schemas/"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody}
    for status in sorted({row.status for row in TABLE.values()})
}


def describe(
    body: type[BaseModel], answer: Any, *others: type[BaseModel]
) -> dict[str, Any]:
    """Return what ``app.post`` is to be told of a route with a body.

    Args:
        body: The model of its request; to be among those of ``Application``.
        answer: The typed dict of its answer, where that is not streamed.
        others: Models that the request may match instead; among those too.
    """
    schemas = [{"$ref": _SCHEMAS + each.__name__} for each in (body, *others)]
    content = {"application/json": {"schema": {"anyOf": schemas} if others else schemas[0]}}
    return {
        "response_model": answer,
        "responses": _ERRORS,
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


class Application(FastAPI):
    """FastAPI whose document also describes the bodies that the routes read.

    Attributes:
        bodies: Models of request bodies.
    """

    bodies: tuple[type[BaseModel], ...] = ()

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            _, schemas = models_json_schema(
                [(body, "validation") for body in self.bodies],
                ref_template=_SCHEMAS + "{model}",
            )
            document["components"]["schemas"].update(schemas["$defs"])
        return super().openapi()
