"""Whatever is wrong with a body of ``/v1/responses`` is a 400 that names the field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.fakes import FakeEngine

TOOL = {"type": "function", "name": "add"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
TEXT = {"role": "user", "content": "a"}
UNSUPPORTED = "unsupported_parameter"


def item(**fields: Any) -> dict[str, Any]:
    return {"input": [fields]}


def part(**fields: Any) -> dict[str, Any]:
    return item(role="user", content=[fields])


BAD = [
    # What the body says, the field that is named, the code.
    ({}, "input", "missing_required_parameter"),
    ({"input": []}, "input", None),
    ({"input": 1}, "input", "invalid_value"),
    ({"input": "a", "temperature": "0"}, "temperature", "invalid_type"),
    ({"input": "a", "temperature": 3}, "temperature", None),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", None),
    ({"input": "a", "top_logprobs": 21}, "top_logprobs", None),
    ({"input": "a", "max_tokens": 1}, "max_tokens", "unknown_parameter"),
    ({"input": "a", "messages": [TEXT]}, "messages", "unknown_parameter"),
    ({"input": "a", "background": True}, "background", UNSUPPORTED),
    ({"input": "a", "conversation": "conv_1"}, "conversation", UNSUPPORTED),
    ({"input": "a", "prompt": {"id": "pmpt_1"}}, "prompt", UNSUPPORTED),
    ({"input": "a", "truncation": "auto"}, "truncation", UNSUPPORTED),
    ({"input": "a", "include": ["everything"]}, "include[0]", "invalid_value"),
    ({"input": "a", "metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"input": "a", "metadata": {"a": "b" * 513}}, "metadata.a", None),
    ({"input": "a", "reasoning": {"effort": "huge"}}, "reasoning.effort", None),
    ({"input": "a", "reasoning": {"mode": "pro"}}, "reasoning.mode", UNSUPPORTED),
    (
        {"input": "a", "prompt_cache_options": {"prewarm": 1}},
        "prompt_cache_options.prewarm",
        "invalid_type",
    ),
    ({"input": "a", "text": {"format": "json"}}, "text.format", "invalid_value"),
    (
        {"input": "a", "text": {"format": {"type": "grammar"}}},
        "text.format.type",
        UNSUPPORTED,
    ),
    (
        {"input": "a", "text": {"format": {"type": "json_schema", "schema": {}}}},
        "text.format.name",
        "missing_required_parameter",
    ),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    (
        {"input": "a", "tools": [{"type": "custom", "name": "x"}]},
        "tools[0].type",
        UNSUPPORTED,
    ),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", None),
    (
        {"input": "a", "tools": [{**TOOL, "parameters": "{}"}]},
        "tools[0].parameters",
        "invalid_type",
    ),
    (
        {"input": "a", "tools": [{**TOOL, "function": {}}]},
        "tools[0].function",
        "unknown_parameter",
    ),
    ({"input": "a", "tools": [TOOL, TOOL]}, "tools", "invalid_value"),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"input": "a", "tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"input": "a", "tool_choice": 1}, "tool_choice", "invalid_value"),
    (
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "function", "name": "b"}},
        "tool_choice",
        "invalid_value",
    ),
    (
        {"input": "a", "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
        "tool_choice.type",
        UNSUPPORTED,
    ),
    ({"input": ["a"]}, "input[0]", "invalid_value"),
    (item(content="a"), "input[0].type", "invalid_value"),
    (item(type="web_search_call", id="ws_1"), "input[0].type", UNSUPPORTED),
    (item(type="message", content="a"), "input[0].role", None),
    (item(role="tool", content="a"), "input[0].role", None),
    (item(role="user"), "input[0].content", None),
    (item(role="user", content=1), "input[0].content", "invalid_type"),
    (part(type="input_image", image_url="x"), "input[0].content[0].type", UNSUPPORTED),
    (part(type="input_file", file_id="x"), "input[0].content[0].type", UNSUPPORTED),
    (part(type="input_text"), "input[0].content[0].text", None),
    (part(text="a"), "input[0].content[0].type", "invalid_value"),
    (item(**CALL | {"arguments": "[]"}), "input[0].arguments", "invalid_value"),
    (item(**CALL | {"arguments": "{"}), "input[0].arguments", "invalid_value"),
    (item(**CALL | {"namespace": "x"}), "input[0].namespace", UNSUPPORTED),
    (
        {"input": [TEXT, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
        "input[1].call_id",
        "invalid_value",
    ),
    (item(type="reasoning", content="a"), "input[0].content", "invalid_type"),
    (item(type="item_reference"), "input[0].id", None),
]


@pytest.mark.parametrize(("body", "param", "code"), BAD)
def test_it_is_refused_by_name(
    engine: FakeEngine,
    http: httpx.Client,
    body: dict[str, Any],
    param: str,
    code: str | None,
) -> None:
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


IDLE: list[dict[str, Any]] = [
    {
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "safety_identifier": "x",
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "tool_choice": "none",
        "conversation": None,
    },
    {"tools": [], "tool_choice": "auto", "reasoning": {"summary": "auto", "effort": None}},
]


@pytest.mark.parametrize("fields", IDLE)
def test_what_asks_for_nothing_is_accepted(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    answer = http.post("/v1/responses", json={"input": "a", **fields})
    assert answer.status_code == 200, answer.text


def test_the_context_is_named_as_input(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "x" * 500})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "input"
