"""Why no more of a prompt was restored, as a sentence for people.

Tells numbers only, never a text: who watches a server may not be who asked it.
Pure; any thread.
"""

from __future__ import annotations

from mtplx.metrics import PrefillMetrics

_SENTENCES = {
    "never_seen": "Nothing that begins like it was read before.",
    "other_model": "Only another model, or other settings, had read it before.",
    "disabled": "Keeping state is switched off.",
    "diverged": "It goes on differently from what was kept, from token {index} on: "
    "{lost} tokens of that were of no use.",
    "no_snapshot": "Its beginning is kept, but can be resumed only at token {cached}: "
    "{lost} tokens were read again.",
    "evicted": "It was kept, and had to make room: {lost} tokens were read again.",
    "too_large": "Not all of it had fitted into memory: {lost} tokens were read again.",
}


def sentence(metrics: PrefillMetrics) -> str:
    """Return why ``metrics`` has no more cached tokens."""
    reason = metrics.cache_miss_reason
    if reason is None:
        return "All that was kept of it was restored."
    parting = metrics.cache_divergence
    return _SENTENCES.get(reason, reason).format(
        index=f"{metrics.cached_tokens if parting is None else parting.index:,}",
        cached=f"{metrics.cached_tokens:,}",
        lost=f"{metrics.cache_lost_tokens:,}",
    )
