"""What may be asked: every field of the SDK is decided on, bad ones are named."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import (
    JSONOutputFormatParam,
    MessageCountTokensParams,
    OutputConfigParam,
    RedactedThinkingBlockParam,
    TextBlockParam,
    ThinkingBlockParam,
    ThinkingConfigAdaptiveParam,
    ThinkingConfigEnabledParam,
    ToolChoiceToolParam,
    ToolParam,
    ToolResultBlockParam,
    ToolUseBlockParam,
)
from anthropic.types.beta.beta_output_config_param import BetaOutputConfigParam
from anthropic.types.beta.beta_tool_param import BetaToolParam
from anthropic.types.beta.message_count_tokens_params import (
    MessageCountTokensParams as BetaCountParams,
)
from anthropic.types.beta.message_create_params import (
    MessageCreateParamsStreaming as BetaCreateParams,
)
from anthropic.types.message_create_params import MessageCreateParamsStreaming

from mtplx.errors import InvalidRequestError, UnsupportedFieldError
from mtplx.server.body import validate
from mtplx.server.messages import body as bodies
from mtplx.server.messages.body import CountTokensBody, MessagesBody
from mtplx.server.requests import JsonObject, wire_names

USER = {"role": "user", "content": "Hello"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
# Sent as headers by the SDK.
HEADERS = {"betas", "user_profile_id", "workspace_id"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "claude-x", "max_tokens": 5, "messages": [USER], **fields}


@pytest.mark.parametrize(
    ("model", "params"),
    [
        (MessagesBody, MessageCreateParamsStreaming),
        (MessagesBody, BetaCreateParams),
        (CountTokensBody, MessageCountTokensParams),
        (CountTokensBody, BetaCountParams),
        (bodies.TextBlock, TextBlockParam),
        (bodies.ThinkingBlock, ThinkingBlockParam),
        (bodies.RedactedThinkingBlock, RedactedThinkingBlockParam),
        (bodies.ToolUseBlock, ToolUseBlockParam),
        (bodies.ToolResultBlock, ToolResultBlockParam),
        (bodies.AnthropicTool, ToolParam),
        (bodies.AnthropicTool, BetaToolParam),
        (bodies.AnthropicToolChoice, ToolChoiceToolParam),
        (bodies.ThinkingConfig, ThinkingConfigEnabledParam),
        (bodies.ThinkingConfig, ThinkingConfigAdaptiveParam),
        (bodies.OutputConfig, OutputConfigParam),
        (bodies.OutputConfig, BetaOutputConfigParam),
        (bodies.JsonOutputFormat, JSONOutputFormatParam),
    ],
)
def test_every_field_of_the_sdk_is_decided_on(
    model: type[JsonObject], params: type[Any]
) -> None:
    table = model.table
    decided = {*wire_names(model), *table.ignored, *table.refused}
    fields = {name for base in params.__mro__ for name in _annotations(base)}
    assert fields - HEADERS <= decided


def _annotations(base: type) -> dict[str, Any]:
    return vars(base).get("__annotations__", {})


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"model": None}, "model"),
    ({"messages": []}, "messages"),
    ({"messages": [{**USER, "role": "tool"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
        "messages[0].content[0].tool_use.id",
    ),
    ({"temperature": 2.1}, "temperature"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "text"}]}, "system[0].text"),
    ({"thinking": {"type": "loud"}}, "thinking.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"output_config": {"effort": "none"}}, "output_config.effort"),
    ({"max_token": 5}, "max_token"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        validate(body(**fields), MessagesBody)
    assert caught.value.param == param


@pytest.mark.parametrize("kind", ["image", "document", "search_result", "server_tool_use"])
def test_other_blocks_are_refused_by_name(kind: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": kind, "source": {}}]
    with pytest.raises(UnsupportedFieldError, match=f'type "{kind}"') as caught:
        validate(body(messages=[{"role": "user", "content": content}]), MessagesBody)
    assert caught.value.param == "messages[0].content[1].type"


def test_images_in_the_result_of_a_tool_are_refused_by_name() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}
    with pytest.raises(UnsupportedFieldError, match='type "image"'):
        validate(body(messages=[{"role": "user", "content": [result]}]), MessagesBody)


@pytest.mark.parametrize(
    ("role", "block"),
    [
        ("user", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
        ("assistant", {"type": "tool_result", "tool_use_id": "1"}),
        ("system", {"type": "thinking", "thinking": "Hm."}),
    ],
)
def test_blocks_belong_to_roles(role: str, block: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=f"`{block['type']}`") as caught:
        validate(body(messages=[{"role": role, "content": [block]}]), MessagesBody)
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "computer_toolset_20260801"},
    ],
)
def test_tools_that_others_define_are_refused_by_name(tool: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError, match=tool["type"]) as caught:
        validate(body(tools=[TOOL, tool]), MessagesBody)
    assert caught.value.param == "tools[1].type"


@pytest.mark.parametrize(
    "fields",
    [
        {"mcp_servers": [{"name": "x"}]},
        {"container": "c"},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"output_config": {"task_budget": {"type": "tokens", "total": 5}}},
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFieldError):
        validate(body(**fields), MessagesBody)


def test_what_claude_code_sends_is_accepted() -> None:
    mark = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    validate(
        body(
            system=[
                {"type": "text", "text": "You are Claude Code.", "cache_control": mark}
            ],
            tools=[{**TOOL, "eager_input_streaming": True, "cache_control": mark}],
            metadata={"user_id": "user_1"},
            thinking={"type": "enabled", "budget_tokens": 31_999},
            context_management={
                "edits": [{"type": "clear_thinking_20251015", "keep": "all"}]
            },
            output_config={"effort": "high"},
            stream=True,
            temperature=1,
        ),
        MessagesBody,
    )
