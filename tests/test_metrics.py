"""PrefillMetrics are what the clock was told, and cannot contradict themselves."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mtplx.metrics import PrefillClock


def finished_clock(**changes):
    clock = PrefillClock(prompt_tokens=100, arrival_s=10.0, start_s=12.0, end_s=17.0)
    clock.restored(60, 0.5, None)
    clock.computed(32, 1.0)
    clock.computed(8, 1.0)
    clock.first_token_s = 17.5
    for name, value in changes.items():
        setattr(clock, name, value)
    return clock


def test_every_figure():
    assert finished_clock().metrics().as_dict() == {
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "new_prefill_tokens": 40,
        "prefill_tok_s": 8.0,
        "prefill_compute_tok_s": 20.0,
        "queue_s": 2.0,
        "cache_restore_s": 0.5,
        "prefill_s": 5.0,
        "ttft_s": 7.5,
        "prefill_chunks": 2,
        "prefill_chunk_size": 32,
        "cache_source": "memory",
        "cache_miss_reason": None,
        "cache_lost_tokens": 0,
        "cache_divergence": None,
    }
    json.dumps(finished_clock().metrics().as_dict(), allow_nan=False)


def test_rates_count_new_tokens_only():
    """Cached tokens in the numerator make a number that lies."""
    metrics = finished_clock().metrics()
    assert metrics.prefill_tok_s == metrics.new_prefill_tokens / metrics.prefill_s


def test_a_rate_without_time_is_none():
    metrics = finished_clock(end_s=12.0, compute_s=0.0).metrics()
    assert metrics.prefill_tok_s is None
    assert metrics.prefill_compute_tok_s is None


def test_no_token_no_ttft():
    assert finished_clock(first_token_s=None).metrics().ttft_s is None


def test_a_miss_has_a_reason_and_no_source():
    clock = PrefillClock(prompt_tokens=4, arrival_s=0.0)
    clock.restored(0, 0.1, "never_seen")
    clock.computed(4, 1.0)
    metrics = clock.metrics()
    assert (metrics.cache_source, metrics.cache_miss_reason) == (None, "never_seen")


def test_tokens_that_do_not_add_up_are_a_bug():
    with pytest.raises(AssertionError):
        finished_clock(cached_tokens=61).metrics()
    with pytest.raises(AssertionError):
        dataclasses.replace(finished_clock().metrics(), cached_tokens=61)


def test_metrics_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        finished_clock().metrics().ttft_s = 0.0
