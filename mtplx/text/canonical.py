"""Tools in one order of keys.

Clients that describe the same tools with their keys in another order, or one client
whose library does not keep an order, would otherwise send different prompts. Decides that
order; ``Tokenizer.render_chat`` applies it, once. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TOOL_ORDER = ("type", "function", "name", "description", "parameters", "strict")
_SCHEMA_ORDER = (
    "$schema",
    "$id",
    "$ref",
    "title",
    "description",
    "type",
    "format",
    "enum",
    "const",
    "default",
    "properties",
    "required",
    "additionalProperties",
    "items",
)
# Their keys are names that a user chose, their values schemas.
_NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
)
# Their values are data, not schemas.
_DATA = frozenset({"enum", "const", "default", "examples", "required"})


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools with known keys in their usual order, then the others by name,
    and the properties of each schema by name. Arrays keep their order."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _tool(value)
        if key == "function" and isinstance(value, Mapping)
        else _schema(value)
        for key, value in _ordered(tool, _TOOL_ORDER)
    }


def _schema(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_schema(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {key: _keyword(key, part) for key, part in _ordered(value, _SCHEMA_ORDER)}


def _keyword(key: str, value: Any) -> Any:
    if key in _DATA:
        return _data(value)
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: _schema(part) for name, part in _ordered(value)}
    return _schema(value)


def _data(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_data(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _data(part) for key, part in _ordered(value)}
    return value


def _ordered(value: Mapping[str, Any], first: Sequence[str] = ()) -> list[tuple[str, Any]]:
    known = [(key, value[key]) for key in first if key in value]
    return known + sorted((key, value[key]) for key in value.keys() - set(first))
