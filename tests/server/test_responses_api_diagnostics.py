"""What `prompt_cache_diagnostics` says, and that its numbers are the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from mtplx.metrics import PrefillClock, PrefillMetrics
from mtplx.server.responses_api.diagnostics import diagnose
from mtplx.server.responses_api.store import Item, StoredResponse


def metrics(cached_tokens: int) -> PrefillMetrics:
    clock = PrefillClock(prompt_tokens=10, arrival_s=0.0, end_s=1.0)
    clock.restored(cached_tokens, 0.0, None if cached_tokens else "evicted")
    clock.computed(10 - cached_tokens, 1.0)
    return clock.metrics()


def found(
    earlier: StoredResponse | None,
    response: dict[str, Any],
    read: Sequence[Item],
    cached: int,
) -> dict[str, Any]:
    return diagnose(earlier, response, read, metrics(cached), keys_matter=True)


def message(name: str, text: str) -> Item:
    return {"id": name, "type": "message", "status": "completed", "content": text}


def body(**changed: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt_cache_key": None,
        "tools": [],
        "reasoning": {"effort": None},
        "instructions": None,
        "output": [],
        "usage": {"input_tokens": 9},
    } | changed


EARLIER = StoredResponse(None, body(), (message("a", "hello"),))


def test_the_same_beginning_under_other_ids_is_a_hit() -> None:
    read = [message("b", "hello"), message("c", "more")]
    assert found(EARLIER, body(), read, 3) == {"type": "cache_hit"}


def test_what_was_reused_whole_is_a_hit_whatever_was_changed() -> None:
    changed = body(reasoning={"effort": "low"})
    assert found(EARLIER, changed, [], 8) == {"type": "cache_hit"}
    assert found(EARLIER, changed, [], 7)["type"] == "cache_miss"


def test_what_is_not_there() -> None:
    assert found(None, body(), EARLIER.read, 8) == {"type": "comparison_response_not_found"}


def test_what_the_client_did_not_change_has_no_name_here() -> None:
    assert found(EARLIER, body(), EARLIER.read, 0) == {"type": "unavailable"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"model": "n"}, "model_changed"),
        ({"prompt_cache_key": "k"}, "prompt_cache_key_changed"),
        ({"tools": [{"name": "add"}]}, "tools_changed"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort_changed"),
        ({"instructions": "Be brief."}, "input_changed"),
    ],
)
def test_what_the_client_changed(changed: dict[str, Any], reason: str) -> None:
    said = found(EARLIER, body(**changed), EARLIER.read, 3)
    assert said == {"type": "cache_miss", "reason": reason, "cache_missed_tokens": 7}


def test_a_key_that_decides_nothing_is_no_reason() -> None:
    other = body(prompt_cache_key="k")
    said = diagnose(EARLIER, other, EARLIER.read, metrics(0), keys_matter=False)
    assert said == {"type": "unavailable"}


@pytest.mark.parametrize("read", [[], [message("a", "hallo")]])
def test_a_changed_or_shorter_input(read: list[Item]) -> None:
    assert found(EARLIER, body(), read, 0)["reason"] == "input_changed"


def test_a_response_that_failed_has_no_usage() -> None:
    failed = StoredResponse(None, body(usage=None), EARLIER.read)
    assert found(failed, body(), EARLIER.read, 3) == {"type": "cache_hit"}
