"""How a prompt is read: planned into spans, prefilled or restored, completed."""

from mtplx.generation.prefill import PromptPrefill, prefill_batch
from mtplx.generation.restore import PromptState, restore_or_prefill_prompt_state
from mtplx.generation.spans import (
    PrefillPlan,
    Span,
    _iter_prefill_chunk_spans,
    _prefill_spans_with_tail_grid,
    plan_prefill,
)

__all__ = [
    "PrefillPlan",
    "PromptPrefill",
    "PromptState",
    "Span",
    "_iter_prefill_chunk_spans",
    "_prefill_spans_with_tail_grid",
    "plan_prefill",
    "prefill_batch",
    "restore_or_prefill_prompt_state",
]
