"""The table of request fields is complete: it knows every parameter of the SDKs."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import chat as types
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.shared_params import FunctionDefinition, ResponseFormatJSONSchema
from openai.types.shared_params.response_format_json_schema import JSONSchema

from mtplx.server.app import BODIES
from mtplx.server.field_rows import BODIES as TOLD
from mtplx.server.field_rows import FieldRow, field_rows

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ROWS = list(field_rows())


def fields(api: str) -> set[str]:
    return {row.field for row in ROWS if row.api == api}


PARAMS: list[tuple[str, str, Any]] = [
    (CHAT, "", chat.CompletionCreateParamsBase),
    (CHAT, "messages[].", types.ChatCompletionDeveloperMessageParam),
    (CHAT, "messages[].", types.ChatCompletionSystemMessageParam),
    (CHAT, "messages[].", types.ChatCompletionUserMessageParam),
    (CHAT, "messages[].", types.ChatCompletionAssistantMessageParam),
    (CHAT, "messages[].", types.ChatCompletionToolMessageParam),
    (CHAT, "messages[].content[].", types.ChatCompletionContentPartTextParam),
    (CHAT, "messages[].content[].", types.ChatCompletionContentPartImageParam),
    (CHAT, "messages[].content[].", types.ChatCompletionContentPartInputAudioParam),
    (CHAT, "messages[].content[].", types.ChatCompletionContentPartRefusalParam),
    (CHAT, "messages[].tool_calls[].", types.ChatCompletionMessageFunctionToolCallParam),
    (CHAT, "messages[].tool_calls[].", types.ChatCompletionMessageCustomToolCallParam),
    (CHAT, "tools[].", types.ChatCompletionFunctionToolParam),
    (CHAT, "tools[].", types.ChatCompletionCustomToolParam),
    (CHAT, "tools[].function.", FunctionDefinition),
    (CHAT, "tool_choice.", types.ChatCompletionNamedToolChoiceParam),
    (CHAT, "tool_choice.", types.ChatCompletionNamedToolChoiceCustomParam),
    (CHAT, "tool_choice.", types.ChatCompletionAllowedToolChoiceParam),
    (CHAT, "stream_options.", types.ChatCompletionStreamOptionsParam),
    (CHAT, "response_format.", ResponseFormatJSONSchema),
    (CHAT, "response_format.json_schema.", JSONSchema),
    (TEXT, "", text.CompletionCreateParamsBase),
]


@pytest.mark.parametrize(("api", "prefix", "params"), PARAMS)
def test_every_parameter_of_the_sdk_is_told(api: str, prefix: str, params: Any) -> None:
    theirs = {prefix + name for name in params.__annotations__}
    assert theirs
    assert theirs - fields(api) == set()


def test_a_field_has_one_state() -> None:
    keys = [(row.api, row.field, row.state) for row in ROWS]
    assert len(keys) == len(set(keys))
    top = [(row.api, row.field) for row in ROWS if "." not in row.field]
    assert len(top) == len(set(top))


def test_what_is_ignored_says_why() -> None:
    for row in ROWS:
        assert row.reason or row.state == "honoured", row


def test_nested_fields_are_told_by_path() -> None:
    assert {
        "messages[].tool_calls[].function.arguments",
        "tools[].function.parameters",
        "stream_options.include_usage",
        "response_format.json_schema.schema",
        "structured_outputs.json",
    } <= fields(CHAT)
    assert FieldRow(TEXT, "suffix", "refused", 'only "" is accepted') in ROWS


def test_every_body_that_is_told_is_in_the_document() -> None:
    assert set(TOLD.values()) <= set(BODIES)
