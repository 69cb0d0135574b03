"""Every reason for a miss has a sentence, and none has a text of a prompt."""

from __future__ import annotations

import re

import pytest

from mtplx.metrics import Divergence, PrefillMetrics
from mtplx.server.misses import sentence
from mtplx.session.match import Match


def metrics(reason: str | None) -> PrefillMetrics:
    parting = Divergence(1212, 1, 2, "kept secret", "sent secret")
    return PrefillMetrics(
        prompt_tokens=5000,
        cached_tokens=1200,
        new_prefill_tokens=3800,
        prefill_tok_s=None,
        prefill_compute_tok_s=None,
        queue_s=0,
        cache_restore_s=0,
        prefill_s=0,
        ttft_s=None,
        prefill_chunks=1,
        prefill_chunk_size=3800,
        cache_source="memory",
        cache_miss_reason=reason,
        cache_lost_tokens=2400,
        cache_divergence=parting,
    )


REASONS = re.findall(r"``(\w+)``", (Match.__doc__ or "").partition("miss_reason:")[2])


def test_the_reasons_are_known() -> None:
    assert "never_seen" in REASONS
    assert len(REASONS) == 7


@pytest.mark.parametrize("reason", REASONS)
def test_each_has_a_sentence(reason: str) -> None:
    said = sentence(metrics(reason))
    assert re.fullmatch(r"[A-Z].*[a-z ]\.", said)
    assert "secret" not in said
    assert "{" not in said


def test_the_numbers_are_told() -> None:
    assert "from token 1,212 on: 2,400 tokens" in sentence(metrics("diverged"))
    assert "only at token 1,200: 2,400 tokens" in sentence(metrics("no_snapshot"))
    assert sentence(metrics(None)) == "All that was kept of it was restored."
