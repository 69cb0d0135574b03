"""Tools as mlx-lm's parsers can read them.

Calls in formats without JSON say nothing of types: a parser looks them up in the tools,
and knows only a plain ``type`` beside each property. Schemas made by programs say it with
references and unions. Pure, and never raises: what is no schema is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEEPEST = 16


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with parameters for every function, and a ``type`` for every
    property that has only one besides null."""
    plain = []
    for tool in tools:
        parameters = _mapping(tool["function"].get("parameters"))
        properties = {
            name: plain_property(schema, parameters)
            for name, schema in _mapping(parameters.get("properties")).items()
        }
        parameters = {**parameters, "properties": properties}
        plain.append({**tool, "function": {**tool["function"], "parameters": parameters}})
    return plain


def plain_property(
    schema: Any, parameters: Mapping[str, Any], depth: int = _DEEPEST
) -> dict[str, Any]:
    """Return the schema of a property with its ``type`` beside it, if it has only one
    besides null.

    Args:
        schema: Of the property.
        parameters: The schema it is part of, for references.
        depth: How many references and unions to look through.
    """
    plain = dict(_mapping(schema))
    inner: Any = None
    if "$ref" in plain:
        inner = _resolve(plain.pop("$ref"), parameters)
    else:
        for keyword in ("anyOf", "oneOf", "allOf"):
            branches = plain.get(keyword)
            if not isinstance(branches, list):
                continue
            others = [branch for branch in branches if branch != {"type": "null"}]
            if len(others) == 1:
                inner = others[0]
                del plain[keyword]
    if inner is not None and depth:
        plain = plain_property(inner, parameters, depth - 1) | plain
    types = plain.get("type")
    if isinstance(types, list) and len(others := [t for t in types if t != "null"]) == 1:
        plain["type"] = others[0]
    if "const" in plain:
        plain.setdefault("enum", [plain["const"]])
    values = plain.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        plain.setdefault("type", "string")
    return plain


def _resolve(reference: Any, parameters: Mapping[str, Any]) -> Any:
    place: Any = parameters
    for step in str(reference).removeprefix("#").split("/")[1:]:
        place = _mapping(place).get(step.replace("~1", "/").replace("~0", "~"))
    return place


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
