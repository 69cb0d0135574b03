"""The shapes of the answers: OpenAI's, exactly, plus ``mtplx``.

Typed dicts, because an answer is built once and dumped once; FastAPI reads them for
the OpenAPI document. Pure; any thread.
"""

from __future__ import annotations

import json
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from mtplx.metrics import PrefillMetrics
from mtplx.types import Finished

# Python's and some clients' splitlines break a line here; JSON strings may escape it.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

FinishReasonOnWire = Literal["stop", "length"]


class PromptTokensDetails(TypedDict):
    """Where the prompt's state came from."""

    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(TypedDict):
    """What the answer's tokens were."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatMessage(TypedDict):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """The one choice of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: None
    finish_reason: FinishReasonOnWire


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


class ChatDelta(TypedDict):
    """What a chunk adds to the message."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(TypedDict):
    """The one choice of a chat chunk."""

    index: int
    delta: ChatDelta
    logprobs: None
    finish_reason: FinishReasonOnWire | None


class ChatCompletionChunk(TypedDict):
    """One event of a chat stream. ``mtplx`` is on the last one."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    mtplx: NotRequired[dict[str, Any]]


class TextChoice(TypedDict):
    """The one choice of a completion, or of a chunk of it."""

    index: int
    text: str
    logprobs: None
    finish_reason: FinishReasonOnWire | None


class TextCompletion(TypedDict):
    """Answer of ``POST /v1/completions``, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    mtplx: NotRequired[dict[str, Any]]


class Model(TypedDict):
    """A served model. ``context_length`` and ``max_model_len`` are the same number,
    in tokens: clients look for either."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int
    max_model_len: int


class ModelList(TypedDict):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Setting(TypedDict):
    """An effective setting; ``source`` is flag, environment, file or default."""

    value: Any
    source: str


class Health(TypedDict):
    """Answer of ``GET /health``."""

    status: Literal["ok", "unavailable"]
    version: str
    model: dict[str, Any]
    engine: dict[str, Any]
    settings: dict[str, Setting]


def usage(metrics: PrefillMetrics, completion_tokens: int) -> Usage:
    """Return the usage of a finished request."""
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": metrics.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": metrics.cached_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def report(finished: Finished) -> dict[str, Any]:
    """Return the `mtplx` object of a finished request."""
    stream = {} if finished.stream is None else finished.stream.as_dict()
    return ({} if finished.metrics is None else finished.metrics.as_dict()) | stream


def dump(value: Any) -> bytes:
    """Return ``value`` as one line of JSON in UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_BREAKS).encode("utf-8", errors="replace")
