"""The call that turns token ids into a complete prompt state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtplx.errors import InvalidRequestError
from mtplx.generation.prefill import PromptPrefill
from mtplx.generation.spans import DEFAULT_TAIL_GRID, PrefillPlan
from mtplx.metrics import PrefillMetrics
from mtplx.models import Model
from mtplx.models.cache import PromptCache
from mtplx.session.bank import SessionBank
from mtplx.types import Prompt


@dataclass(frozen=True)
class PromptState:
    """A prompt, read.

    Attributes:
        cache: The KV cache, complete up to the last token. It is the caller's own:
            nothing done with it changes what the bank holds.
        logits: ``[vocab]``, of the last prompt token.
        model: The model that computed it; ``model.decode(cache)`` goes on from here.
        cached_tokens: Tokens that came from the bank.
        plan: What was computed, span by span.
        metrics: What it cost.
    """

    cache: PromptCache
    logits: mx.array
    model: Model
    cached_tokens: int
    plan: PrefillPlan
    metrics: PrefillMetrics


def restore_or_prefill_prompt_state(
    *,
    token_ids: Sequence[int],
    session_bank: SessionBank | None = None,
    stable_prefix_len: int = 0,
    model: Model | None = None,
    edges: Sequence[int] = (),
    window: int | None = None,
    tail_grid: int = DEFAULT_TAIL_GRID,
) -> PromptState:
    """Restore the longest known prefix of a prompt, compute the rest, keep the result.

    Args:
        token_ids: The prompt, at least one token.
        session_bank: Where to look and to keep; None does neither.
        stable_prefix_len: Length of the prefix that the next prompt is sure to begin
            with; 0 when unknown. A model whose state cannot be cut keeps it there.
        model: Reads the prompt; default the bank's.
        edges: Further indices at which such a model's state is kept.
        window: Longest span in tokens; None takes the model's.
        tail_grid: Grid on which the tail is cut.

    Raises:
        InvalidRequestError: No tokens, a token outside the vocabulary, a stable prefix
            longer than the prompt, or no model.
        KVBudgetError: Its state does not fit the bank's ``max_bytes``.
    """
    model = model or (session_bank.model if session_bank else None)
    if model is None:
        raise InvalidRequestError(
            "Give a model, or a SessionBank that has one.", param="model"
        )
    prompt = Prompt(tuple(map(int, token_ids)), tuple(edges), stable_prefix_len)
    _validate(prompt, model)
    prefill = PromptPrefill(
        model,
        prompt,
        session_bank,
        arrival_s=time.perf_counter(),
        window=window or model.prefill_window,
        tail_grid=tail_grid,
    )
    try:
        prefill.run()
        prefill.store(prompt.token_ids)
    finally:
        prefill.release(keep_cache=True)
    metrics = prefill.metrics()
    assert metrics is not None
    assert prefill.cache.logits is not None
    return PromptState(
        cache=prefill.cache,
        logits=prefill.cache.logits,
        model=model,
        cached_tokens=metrics.cached_tokens,
        plan=prefill.plan,
        metrics=metrics,
    )


def _validate(prompt: Prompt, model: Model) -> None:
    total = len(prompt.token_ids)
    if total == 0:
        raise InvalidRequestError("A prompt needs at least one token.", param="token_ids")
    if not 0 <= min(prompt.token_ids) <= max(prompt.token_ids) < model.vocab_size:
        raise InvalidRequestError(
            f"Token ids must lie in [0, {model.vocab_size}).", param="token_ids"
        )
    if not 0 <= prompt.stable_prefix_len <= total:
        raise InvalidRequestError(
            f"stable_prefix_len must lie in [0, {total}], the length of the prompt, "
            f"not {prompt.stable_prefix_len}.",
            param="stable_prefix_len",
        )
