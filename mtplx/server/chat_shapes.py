"""The shapes of a chat's answer, whole and in chunks: OpenAI's, plus ``mtplx``,
``reasoning_content`` and ``prompt_progress``. Pure; runs on the event loop.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from mtplx.server.logprobs import ChatLogprobs
from mtplx.server.responses import PromptProgress, Usage
from mtplx.server.turn import TurnFinishReason


class CalledFunction(TypedDict):
    """A function and the JSON text of its arguments."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the answer makes."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    """The answer of a chat. ``content`` is None beside calls and nothing else."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: TurnFinishReason


class ChatCompletion(TypedDict):
    """Answer of ``POST /v1/chat/completions``. ``mtplx`` is a ``PrefillMetrics``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    mtplx: dict[str, Any]


class FunctionDelta(TypedDict):
    """What a chunk adds to a called function."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What a chunk adds to a call. ``id``, ``type`` and the name come first and once."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    """What a chunk adds to the message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: TurnFinishReason | None


class ChatCompletionChunk(TypedDict):
    """One event of a chat stream. ``mtplx`` is on the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    prompt_progress: NotRequired[PromptProgress]
    mtplx: NotRequired[dict[str, Any]]
