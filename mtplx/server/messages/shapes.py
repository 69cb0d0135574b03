"""The shapes of Anthropic's answers, plus ``mtplx``.

Typed dicts, because an answer is built once and dumped once; FastAPI reads them for the
OpenAPI document. Pure; any thread.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextContent(TypedDict):
    """A piece of the answer."""

    type: Literal["text"]
    text: str


class ThinkingContent(TypedDict):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseContent(TypedDict):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class ThinkingTokens(TypedDict):
    """What the answer's tokens were."""

    thinking_tokens: int


class AnthropicUsage(TypedDict):
    """Tokens read and written. ``input_tokens`` were computed, and
    ``cache_read_input_tokens`` restored: the two add up to the prompt. Nothing is paid
    for being kept, so ``cache_creation_input_tokens`` is 0."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class CacheMissReason(TypedDict):
    """Why a prompt was not restored as far as the one before it."""

    type: Literal[
        "model_changed",
        "system_changed",
        "tools_changed",
        "messages_changed",
        "previous_message_not_found",
        "unavailable",
    ]
    cache_missed_input_tokens: NotRequired[int]


class CacheDiagnostics(TypedDict):
    """Answer to a request's ``diagnostics``."""

    cache_miss_reason: CacheMissReason


class AnthropicAnswer(TypedDict):
    """Answer of ``POST /v1/messages``."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage
    diagnostics: NotRequired[CacheDiagnostics | None]
    mtplx: NotRequired[dict[str, Any]]


class MessageEvent(TypedDict):
    """An event of the stream of ``POST /v1/messages``. Besides, each type of them has
    fields of its own."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: NotRequired[AnthropicAnswer]
    usage: NotRequired[AnthropicUsage]


class TokenCount(TypedDict):
    """Answer of ``POST /v1/messages/count_tokens``."""

    input_tokens: int
