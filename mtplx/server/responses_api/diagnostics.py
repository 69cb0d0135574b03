"""``prompt_cache_diagnostics``: why the prompt of an earlier response was not reused.

A client names the response it compares with. How much was reused, the engine measured;
what the client changed can be read off the two requests. Where it changed nothing and
nothing was reused, this API has no word for the reason, and the report in ``mtplx`` has
it. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtplx.metrics import PrefillMetrics
from mtplx.server.responses_api.store import Item, StoredResponse

# Field of a response -> the reason to give when it changed. They decide whose state may
# be used at all, or come before the items in a prompt.
_REASONS = {
    "model": "model_changed",
    "prompt_cache_key": "prompt_cache_key_changed",
    "tools": "tools_changed",
    "reasoning": "reasoning_effort_changed",
    "instructions": "input_changed",
}


def diagnose(
    earlier: StoredResponse | None,
    response: Mapping[str, Any],
    read: Sequence[Item],
    metrics: PrefillMetrics,
    *,
    keys_matter: bool,
) -> dict[str, Any]:
    """Return what to say about the prompt of ``response``, which reads ``read``.

    Args:
        earlier: The response to compare with; None where it is not there.
        response: As it is sent, but for this.
        read: The items its prompt was made of.
        metrics: Of its prompt.
        keys_matter: State is shared under one `prompt_cache_key` only.
    """
    if earlier is None:
        return {"type": "comparison_response_not_found"}
    usage = earlier.body["usage"]
    # The last token of a prompt is always computed.
    if usage is not None and metrics.cached_tokens >= usage["input_tokens"] - 1:
        return {"type": "cache_hit"}
    reason = _change(earlier, response, read, keys_matter)
    if reason is not None:
        missed = metrics.new_prefill_tokens
        return {"type": "cache_miss", "reason": reason, "cache_missed_tokens": missed}
    return {"type": "cache_hit" if metrics.cached_tokens else "unavailable"}


def _change(
    earlier: StoredResponse,
    response: Mapping[str, Any],
    read: Sequence[Item],
    keys_matter: bool,
) -> str | None:
    for field, reason in _REASONS.items():
        if field == "prompt_cache_key" and not keys_matter:
            continue
        if earlier.body[field] != response[field]:
            return reason
    same = len(earlier.read) <= len(read) and all(
        _content(before) == _content(now)
        for before, now in zip(earlier.read, read, strict=False)
    )
    return None if same else "input_changed"


def _content(item: Item) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in ("id", "status")}
