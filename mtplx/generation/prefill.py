"""One prompt on its way to a complete KV cache.

``PromptPrefill`` asks the bank what can be restored, makes the plan, and runs one span
at a time, so that its caller decides what happens between two spans. It measures what
it does and hands finished state to the bank. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
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
    KVBuffer,
    KVRows,
    LayerSnapshot,
    PromptCache,
    restore_cache,
    resume_cache,
    take_snapshot,
)
from mtplx.session import Lease, Lookup, Match, SessionBank
from mtplx.session.state import TokenIds
from mtplx.session.tree import as_run
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


Score = Callable[[mx.array, int], None]
"""``score(logits[n, vocab], start)``: told the logits of every prompt token from index
``start`` on."""

# Logits of this many tokens are held at once.
_SCORED_TOKENS = 64


class PromptPrefill:
    """Restores what the bank has, then computes the rest as far as it is told.

    Args:
        model: Reads the prompt.
        prompt: At least one token.
        bank: None restores and keeps nothing.
        arrival_s: ``time.perf_counter()`` at which the request arrived.
        window: Longest span in tokens.
        tail_grid: Grid on which the tail is cut.
        namespace: State is shared only within it.
        state_tokens: Tokens, answer included, that memory is reserved for at first.
        score: Gets the logits of the prompt; nothing is restored then.
        lookup: Where the bank was asked before, if it was.

    Attributes:
        tokens: The prompt as the bank takes it, ``[n]`` int32.
        cache: Complete up to ``cache.offset``.
        plan: Edges, snapshots and spans, decided here once.
        clock: What it cost so far.
        key: What its state is filed under.
        kept_tokens: Tokens whose state the bank has.

    Raises:
        KVBudgetError: There is no room for it beside what runs.
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
        namespace: str = "",
        state_tokens: int = 0,
        score: Score | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.tokens = as_run(prompt.token_ids)
        self.bank = bank
        self.key = replace(model.state_key, namespace=namespace)
        self.clock = PrefillClock(len(prompt.token_ids), arrival_s)
        self.clock.start_s = time.perf_counter()
        self._score = score
        self._reserved_tokens = max(state_tokens, len(prompt.token_ids))
        self._lease: Lease | None = None
        self._start(lookup)
        match = self._lease.match if self._lease else Match(0, 0, "disabled")
        self.clock.restored(
            self.cache.offset,
            time.perf_counter() - self.clock.start_s,
            match.miss_reason,
            match.lost_tokens,
            match.divergence,
        )
        self.plan = plan_prefill(
            prompt,
            restored_tokens=self.cache.offset,
            # Without a bank nothing is kept, so no edge is worth a forward.
            any_prefix=self.key.any_prefix or bank is None,
            window=window,
            tail_grid=tail_grid,
            parts_at=match.shared_tokens if match.divergence else None,
        )
        self.kept_tokens = self.cache.offset
        self._snapshots: dict[int, LayerSnapshot] = {}

    def _start(self, lookup: Lookup | None) -> None:
        """Restore what can be, in the bank's own buffer if nobody else runs there."""
        length = 0
        if self.bank is not None:
            nbytes = self.model.state_size.nbytes(self._reserved_tokens)
            if lookup is None:
                # Whoever wants all logits computes all of the prompt.
                wanted = self.tokens if self._score is None else ()
                lookup = self.bank.look_up(self.key, wanted)
            self._lease = lookup.acquire(nbytes)
            length = self._lease.match.length
        if self._lease is None or length == 0:
            self.cache = self.model.new_cache()
        else:
            layers = make_prompt_cache(self.model.network)
            snapshot = cast(LayerSnapshot | None, self._lease.snapshot)
            if self._lease.borrowed is not None:
                buffer = cast(KVBuffer, self._lease.borrowed)
                self.cache = resume_cache(layers, length, buffer, snapshot)
            else:
                rows = cast(tuple[KVRows, ...], self._lease.rows)
                room = len(self.prompt.token_ids) - length
                self.cache = restore_cache(layers, length, rows, snapshot, room=room)
        if self._lease is not None:
            self._lease.run_in(self.cache.buffer, nbytes)

    @property
    def complete(self) -> bool:
        """True once the logits of the last prompt token are there."""
        return self.cache.offset >= self.plan.prompt_tokens

    @property
    def scores(self) -> bool:
        """True where the prompt's logits are wanted; its spans share no forward then."""
        return self._score is not None

    def run(self, end: int | None = None) -> None:
        """Compute up to index ``end`` of the prompt; default its end.

        Args:
            end: Where to stop, beyond what is computed. It need not be the end of a
                span of the plan.
        """
        end = self.plan.prompt_tokens if end is None else end
        for span in self.plan.spans_until(end, self.cache.offset):
            begin_s = time.perf_counter()
            if self._score is None:
                prefill_batch(self.model, self.cache, self.prompt.token_ids, span)
            else:
                self._run_scored(span, self._score)
            self.computed(span.end - span.start, time.perf_counter() - begin_s)

    def _run_scored(self, span: Span, score: Score) -> None:
        for start in range(span.start, span.end, _SCORED_TOKENS):
            tokens = self.prompt.token_ids[start : min(start + _SCORED_TOKENS, span.end)]
            score(self.model.score(self.cache, tokens), start)

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

    def reserve(self, tokens: int) -> bool:
        """Make sure that the cache may hold ``tokens`` tokens; False if it may not."""
        if self._lease is None or tokens <= self._reserved_tokens:
            return True
        # The buffer grows in steps anyway.
        size = self.model.state_size
        wanted = -(-tokens // size.step_tokens) * size.step_tokens
        if not self._lease.reserve(size.nbytes(wanted)):
            return False
        self._reserved_tokens = wanted
        return True

    def keep_progress(self) -> None:
        """Give the bank what was computed, each time that it is worth it.

        That is after every span, or where a snapshot was taken. A prompt that fails or
        is cancelled resumes there.
        """
        # A step may have gone on beyond the last snapshot.
        any_prefix = self.key.any_prefix
        end = self.cache.offset if any_prefix else max(self._snapshots, default=0)
        if end > self.kept_tokens:
            self.store(self.tokens[:end])

    def store(self, token_ids: TokenIds) -> None:
        """Give the bank the state of everything computed so far. Nothing is copied.

        Args:
            token_ids: The tokens in the cache: the prompt, or the part of it that was
                computed, and what was generated after it. Fewer than are in the cache
                only where a snapshot was taken, or none is needed.
        """
        if self.bank is None or not self.cache.offset:
            return
        tokens = token_ids[: self.cache.offset]
        if not self.key.any_prefix and len(tokens) not in self._snapshots:
            assert len(tokens) == self.cache.offset
            self._snapshots[len(tokens)] = take_snapshot(self.cache)
        self.bank.store(
            self.key, tokens, self.cache.buffer.rows, self._snapshots, whole=True
        )
        self._snapshots = {}
        self.kept_tokens = len(tokens)

    def release(self, *, keep_cache: bool = False, broken: bool = False) -> None:
        """Give the bank's state back, with what was stored.

        Args:
            keep_cache: The caller goes on using ``cache``; the bank copies what it holds
                of it. Otherwise it must not be used any more.
            broken: What was computed is wrong; the bank keeps nothing of it.
        """
        intact = not broken
        try:
            self.cache.leave()
        except Exception:  # A forward failed; so will whatever needs its state.
            intact = False
        if self._lease is not None:
            intact = intact and self.cache.buffer.intact()
            self._lease.release(intact=intact, keep_buffer=keep_cache)
