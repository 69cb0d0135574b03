"""One prompt on its way to a complete KV cache.

``PromptPrefill`` asks the bank what can be restored, makes the plan, and runs one span
at a time, so that its caller decides what happens between two spans. It measures what
it does and hands finished state to the bank. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mtplx.generation.spans import (
    DEFAULT_TAIL_GRID,
    DEFAULT_WINDOW,
    Span,
    plan_prefill,
)
from mtplx.metrics import PrefillClock, PrefillMetrics
from mtplx.models import Model
from mtplx.models.cache import (
    KVRows,
    LayerSnapshot,
    PromptCache,
    copy_rows,
    restore_cache,
    take_snapshot,
)
from mtplx.session.bank import Lease, SessionBank
from mtplx.types import Prompt


def prefill_batch(
    model: Model, cache: PromptCache, token_ids: Sequence[int], span: Span
) -> mx.array | None:
    """Compute one span of a prompt.

    A span that is not the tail only extends the cache. The tail runs decode-only with
    ``max_new_tokens=0``: it completes the cache, emits nothing, and leaves the logits
    of the last prompt token in the cache.

    Args:
        model: Computes it.
        cache: Holds the state of exactly ``span.start`` tokens.
        token_ids: The whole prompt.
        span: The part to compute.

    Returns:
        For the tail the logits ``[vocab]`` of the last prompt token; else None.
    """
    assert cache.offset == span.start
    tokens = token_ids[span.start : span.end]
    if not span.is_tail:
        model.prefill(cache, tokens)
        return None
    model.decode(cache, max_new_tokens=0, token_ids=tokens)
    return cache.logits


class PromptPrefill:
    """Restores what the bank has, then computes the rest as far as it is told.

    Args:
        model: Reads the prompt.
        prompt: At least one token.
        bank: None restores and keeps nothing.
        arrival_s: ``time.perf_counter()`` at which the request arrived.
        window: Longest span in tokens.
        tail_grid: Grid on which the tail is cut.

    Attributes:
        cache: Complete up to ``cache.offset``.
        plan: Edges, snapshots and spans, decided here once.
        clock: What it cost so far.
    """

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        bank: SessionBank | None,
        *,
        arrival_s: float,
        window: int = DEFAULT_WINDOW,
        tail_grid: int = DEFAULT_TAIL_GRID,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.bank = bank
        self.clock = PrefillClock(len(prompt.token_ids), arrival_s)
        self.clock.start_s = time.perf_counter()
        self._lease = bank.acquire(model.state_key, prompt.token_ids) if bank else None
        self.cache = _restore(model, self._lease, len(prompt.token_ids))
        self.clock.restored(
            self.cache.offset,
            time.perf_counter() - self.clock.start_s,
            self._lease.match.miss_reason if self._lease else "disabled",
        )
        self.plan = plan_prefill(
            prompt,
            restored_tokens=self.cache.offset,
            # Without a bank nothing is kept, so no edge is worth a forward.
            any_prefix=model.state_key.any_prefix or bank is None,
            window=window,
            tail_grid=tail_grid,
        )
        self._kept_tokens = self.cache.offset
        self._snapshots: dict[int, LayerSnapshot] = {}

    @property
    def complete(self) -> bool:
        """True once the logits of the last prompt token are there."""
        return self.cache.offset >= self.plan.prompt_tokens

    def run(self, end: int | None = None) -> None:
        """Compute up to index ``end`` of the prompt; default its end.

        Args:
            end: Where to stop, beyond what is computed. It need not be the end of a
                span of the plan.
        """
        end = self.plan.prompt_tokens if end is None else end
        for span in self.plan.spans_until(end, self.cache.offset):
            begin_s = time.perf_counter()
            prefill_batch(self.model, self.cache, self.prompt.token_ids, span)
            self.computed(span.end - span.start, time.perf_counter() - begin_s)

    def computed(self, tokens: int, seconds: float) -> None:
        """Take note of a span that is in the cache now.

        Called for spans that were computed elsewhere, in a forward shared with streams.

        Args:
            tokens: Its length.
            seconds: Time of the forward, all of it if it was shared.
        """
        self.clock.computed(tokens, seconds)
        if self.cache.offset in self.plan.snapshots:
            self._snapshots[self.cache.offset] = take_snapshot(self.cache)
        if self.complete:
            self.clock.end_s = time.perf_counter()

    def metrics(self) -> PrefillMetrics | None:
        """Return what the prefill cost; None while it is not complete."""
        return self.clock.metrics() if self.complete else None

    def keep_progress(self) -> None:
        """Give the bank what was computed, each time that it is worth it.

        That is after every window of tokens, or where a snapshot was taken. A prompt
        that fails or is cancelled resumes there.
        """
        any_prefix = self.model.state_key.any_prefix
        # A step may have gone on beyond the last snapshot.
        end = self.cache.offset if any_prefix else max(self._snapshots, default=0)
        least = self.plan.window if any_prefix else 1
        if self.complete:
            self.store(self.prompt.token_ids)
        elif end - self._kept_tokens >= least:
            self.store(self.prompt.token_ids[:end])

    def store(self, token_ids: Sequence[int]) -> None:
        """Give the bank the state of everything computed so far.

        Args:
            token_ids: The tokens in the cache: the prompt, or the part of it that was
                computed, and what was generated after it. Fewer than are in the cache
                only where a snapshot was taken, or none is needed.
        """
        if self.bank is None or not self.cache.offset:
            return
        tokens = token_ids[: self.cache.offset]
        key = self.model.state_key
        if not key.any_prefix and len(tokens) not in self._snapshots:
            assert len(tokens) == self.cache.offset
            self._snapshots[len(tokens)] = take_snapshot(self.cache)
        self.bank.store(
            key,
            tokens,
            lambda start, end: copy_rows(self.cache, start, end),
            self._snapshots,
        )
        self._snapshots = {}
        self._kept_tokens = len(tokens)

    def release(self) -> None:
        """Let go of the bank's state. The cache stays as it is."""
        if self._lease is not None:
            self._lease.release()


def _restore(model: Model, lease: Lease | None, prompt_tokens: int) -> PromptCache:
    if lease is None or lease.match.length == 0:
        return model.new_cache()
    length = lease.match.length
    return restore_cache(
        make_prompt_cache(model.network),
        length,
        cast(tuple[KVRows, ...], lease.rows),
        cast(LayerSnapshot | None, lease.snapshot),
        room=prompt_tokens - length,
    )
