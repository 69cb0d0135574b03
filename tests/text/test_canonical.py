"""Tools that differ in the order of keys only are the same tokens."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.text.canonical import canonical_tools

from .tokenizers_factory import QWEN, make_tokenizer, user

SCHEMA = {
    "type": "object",
    "title": "Query",
    "description": "What to find.",
    "properties": {
        "type": {"type": "string", "enum": ["web", "files", "all"]},
        "limits": {
            "type": "array",
            "items": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/span"}]},
            "default": {"to": 9, "from": 1},
        },
        "properties": {"type": "object", "properties": {"b": {}, "a": {}}},
    },
    "required": ["type", "limits"],
    "$defs": {"span": {"type": "object", "x-note": 1, "additionalProperties": False}},
}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": SCHEMA,
        "strict": True,
    },
}


def shuffled(value: Any, draw: Any) -> Any:
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: shuffled(value[key], draw) for key in keys}
    if isinstance(value, list):
        return [shuffled(item, draw) for item in value]
    return value


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_order_of_keys_gives_one_text(data):
    tools = canonical_tools([shuffled(TOOL, data.draw)])
    assert json.dumps(tools) == json.dumps(canonical_tools([TOOL]))


def test_nothing_but_the_order_of_keys_changes():
    (tool,) = canonical_tools([TOOL])
    assert tool == TOOL
    assert canonical_tools([tool]) == [tool]
    schema = tool["function"]["parameters"]
    assert schema["required"] == ["type", "limits"]
    assert schema["properties"]["type"]["enum"] == ["web", "files", "all"]


def test_known_keys_come_in_their_usual_order_and_names_sorted():
    (tool,) = canonical_tools([TOOL])
    assert list(tool["function"]) == ["name", "description", "parameters", "strict"]
    schema = tool["function"]["parameters"]
    assert list(schema) == [
        "title",
        "description",
        "type",
        "properties",
        "required",
        "$defs",
    ]
    assert list(schema["properties"]) == ["limits", "properties", "type"]
    assert list(schema["properties"]["properties"]["properties"]) == ["a", "b"]
    assert list(schema["properties"]["limits"]["default"]) == ["from", "to"]


def test_a_property_named_like_a_keyword_is_a_name():
    schema = {"properties": {"type": {}, "description": {}, "enum": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    (ordered,) = canonical_tools([tool])
    names = list(ordered["function"]["parameters"]["properties"])
    assert names == ["description", "enum", "type"]


def test_clients_that_order_keys_differently_share_a_prompt():
    tokenizer = make_tokenizer(template=QWEN)
    usual = tokenizer.render_chat([user("Hi")], tools=[TOOL])
    other = tokenizer.render_chat([user("Hi")], tools=[backwards(TOOL)])
    assert json.dumps(backwards(TOOL)) != json.dumps(TOOL)
    assert other == usual


def backwards(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(item) for item in value] if isinstance(value, list) else value
