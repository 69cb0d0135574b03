"""What the answers of several routes share: counts, the ``mtplx`` report, JSON.

The shapes of one API stand beside its route. All are typed dicts, because an answer is
built once and dumped once; FastAPI reads them for the OpenAPI document. Pure; any thread.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from starlette.responses import Response
from typing_extensions import TypedDict

from mtplx.metrics import PrefillMetrics
from mtplx.types import Finished, PrefillProgress

# Python's and some clients' splitlines break a line here; JSON strings may escape it.
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


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


class PromptProgress(TypedDict):
    """How far the prompt has been read, in tokens, ``cache`` of them restored;
    ``time_ms`` since the request arrived."""

    total: int
    cache: int
    processed: int
    time_ms: int


class Model(TypedDict):
    """A served model, which is ``loaded`` or will be when it is asked for; its context is
    not known before. ``context_length`` and ``max_model_len`` are the same number, in
    tokens: clients look for either."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    loaded: bool
    context_length: NotRequired[int]
    max_model_len: NotRequired[int]


class ModelList(TypedDict):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Setting(TypedDict):
    """An effective setting; ``source`` is flag, environment, file or default."""

    value: Any
    source: str


class Health(TypedDict):
    """Answer of ``GET /health``: ``model`` is the first one, ``models`` are those in
    memory. Without a key, where one is asked for, it is the status alone."""

    status: Literal["ok", "unavailable"]
    version: NotRequired[str]
    model: NotRequired[dict[str, Any]]
    models: NotRequired[list[dict[str, Any]]]
    engine: NotRequired[dict[str, Any]]
    settings: NotRequired[dict[str, Setting]]


def usage(
    ends: Sequence[Finished], *, choices: int = 1, reasoning_tokens: int = 0
) -> Usage:
    """Return the usage of finished requests.

    Args:
        ends: In the order of the choices.
        choices: How many answers each prompt has; its tokens count once.
        reasoning_tokens: Of all answers together.
    """
    prompts = [_metrics(end) for end in ends[::choices]]
    prompt_tokens = sum(each.prompt_tokens for each in prompts)
    completion_tokens = sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(each.cached_tokens for each in prompts),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def report(*ends: Finished) -> dict[str, Any]:
    """Return the `mtplx` object of finished requests: the first one's, and each one's
    under ``choices`` where there are several."""
    first, *others = [
        _metrics(end).as_dict() | (end.stream.as_dict() if end.stream else {})
        for end in ends
    ]
    return first | {"choices": [first, *others]} if others else first


def _metrics(end: Finished) -> PrefillMetrics:
    assert end.metrics is not None, "only a cancelled request has none"
    return end.metrics


def progress(event: PrefillProgress, arrival_s: float) -> PromptProgress:
    """Return the shape of ``event`` at this moment."""
    return {
        "total": event.prompt_tokens,
        "cache": event.cached_tokens,
        "processed": event.done_tokens,
        "time_ms": int(1000 * (time.perf_counter() - arrival_s)),
    }


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer with this body."""
    return Response(dump(body), status, headers, media_type="application/json")


def dump(value: Any) -> bytes:
    """Return ``value`` as one line of JSON in UTF-8."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_LINE_BREAKS).encode("utf-8", errors="replace")
