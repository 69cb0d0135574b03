"""The ways to a prompt's state, short of the engine: each is run and compared.

Every way says what it exercised and fails where that did not take place: that the prompt
was split, that state was restored, from where, and how much of it. Runs on the thread
that owns MLX.
"""

from __future__ import annotations

import math
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from mtplx.engine.disk import DiskWork
from mtplx.generation import PromptPrefill
from mtplx.models import Model
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache
from mtplx.models.forward import SharedSpan
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.types import Prompt
from mtplx.verify.checks import NotPossibleError, require
from mtplx.verify.reference import Reference, Tally

Reach = Mapping[str, int | str]

_DISK_WAIT_S = 600.0
_UNLIMITED_BYTES = 1 << 50


class Ways:
    """Each method reads the reference's prompt in its own way, then the answer.

    Args:
        model: Under test.
        reference: What must come out.
        window: Longest span in tokens; several make up the prompt.
        shared_tokens: Length of the prefix that is restored, in the ways that restore.
    """

    def __init__(
        self, model: Model, reference: Reference, window: int, shared_tokens: int
    ) -> None:
        self._model = model
        self._reference = reference
        self._prompt = reference.prompt
        self._window = window
        self._shared = shared_tokens
        # Begins like the prompt; every token after that differs.
        rest = [(token + 1) % model.vocab_size for token in self._prompt[shared_tokens:]]
        self._other = (*self._prompt[:shared_tokens], *rest)

    # -- computed ---------------------------------------------------------------

    def chunked(self, tally: Tally) -> Reach:
        """Read the prompt in spans."""
        prefill = self._start(self._prompt, None)
        prefill.run()
        spans = prefill.clock.span_tokens
        require(len(spans) > 1, "The prompt was not split.")
        self._follow(tally, [prefill.cache])
        return {"spans": len(spans), "longest span": max(spans)}

    def together(self, tally: Tally) -> Reach:
        """Decode beside two streams of other lengths, in one allocation with them."""
        decoder = BatchDecoder(self._model)
        if not decoder.forms_groups:
            raise NotPossibleError("The streams of this model lie in no groups.")
        caches = self._batched(decoder, tally)
        groups = {id(cache.place and cache.place[0]) for cache in caches}
        require(len(groups) == 1, "The streams lay apart.")
        return {**self._steps(caches), "traced": str(decoder.traces)}

    def apart(self, tally: Tally) -> Reach:
        """The same, each stream in an allocation of its own."""
        decoder = BatchDecoder(self._model)
        decoder.seating.holds = lambda nbytes: False
        caches = self._batched(decoder, tally)
        return {**self._steps(caches), "mode": decoder.mode}

    def _batched(self, decoder: BatchDecoder, tally: Tally) -> list[PromptCache]:
        prefill = self._start(self._prompt, None)
        prefill.run()
        caches = [prefill.cache, *self._streams()]
        tally.add(len(self._prompt) - 1, prefill.cache.logits)
        for _ in self._reference.answer[:-1]:
            self._step(decoder, caches, tally)
        return caches

    def _steps(self, caches: Sequence[PromptCache]) -> Reach:
        return {"rows": len(caches), "steps": len(self._reference.answer) - 1}

    def shared_span(self, tally: Tally) -> Reach:
        """Read the prompt in spans that share the forwards of two streams."""
        decoder = BatchDecoder(self._model)
        if not decoder.takes_spans:
            raise NotPossibleError(
                f"In mode {decoder.mode} the spans of this model get forwards of their own."
            )
        streams, cache, spans = self._streams(), self._model.new_cache(), 0
        while cache.offset < len(self._prompt):
            end = min(cache.offset + self._window, len(self._prompt))
            tokens = self._prompt[cache.offset : end]
            span = SharedSpan(cache, tokens, is_tail=end == len(self._prompt))
            self._step(decoder, streams, tally, span)
            spans += 1
        require(decoder.takes_spans, "A shared forward failed; see the log.")
        self._follow(tally, [cache])
        return {"shared spans": spans, "rows beside": len(streams)}

    # -- restored ---------------------------------------------------------------

    def warm(self, tally: Tally) -> Reach:
        """Send the prompt again."""
        bank = SessionBank()
        self._keep(self._prompt, bank)
        prefill = self._start(self._prompt, bank)
        return self._restored(tally, bank, [prefill])

    def borrowed(self, tally: Tally) -> Reach:
        """Go on in the buffer of a prompt that began in the same way."""
        bank = SessionBank()
        self._keep(self._other, bank)
        prefill = self._start(self._prompt, bank)
        require(self._runs_in_the_banks(prefill, bank), "The buffer was copied.")
        return self._restored(tally, bank, [prefill], self._shared)

    def copied(self, tally: Tally) -> Reach:
        """Let two requests go on from one prefix, taking turns."""
        bank = SessionBank()
        self._keep(self._other, bank)
        prefills = [self._start(self._prompt, bank) for _ in range(2)]
        require(self._runs_in_the_banks(prefills[0], bank), "The first one copied.")
        require(
            prefills[0].cache.buffer is not prefills[1].cache.buffer,
            "Two requests write to one buffer.",
        )
        return self._restored(tally, bank, prefills, self._shared)

    def from_disk(self, tally: Tally) -> Reach:
        """Restore after a restart, from a run of tokens in which the prompts part."""
        with tempfile.TemporaryDirectory(prefix="mtplx-verify-") as folder:
            written = self._write_to(Path(folder))
            bank = SessionBank()
            read = self._read_from(Path(folder), bank)
        prefill = self._start(self._prompt, bank)
        reach = self._restored(tally, bank, [prefill], self._shared)
        return {**reach, "source": "disk", "bytes written": written, "bytes read": read}

    # -- steps ------------------------------------------------------------------

    def _start(self, token_ids: Sequence[int], bank: SessionBank | None) -> PromptPrefill:
        return PromptPrefill(
            self._model,
            Prompt(tuple(token_ids), edges=(self._shared,)),
            bank,
            arrival_s=0.0,
            window=self._window,
        )

    def _keep(self, token_ids: Sequence[int], bank: SessionBank) -> None:
        prefill = self._start(token_ids, bank)
        try:
            prefill.run()
            prefill.store(token_ids)
        finally:
            prefill.release()

    def _restored(
        self,
        tally: Tally,
        bank: SessionBank,
        prefills: Sequence[PromptPrefill],
        expected_tokens: int | None = None,
    ) -> Reach:
        """Compute the rest of the prompts, follow them, and hand their state back.

        Args:
            tally: Counts.
            bank: Must be sound afterwards.
            prefills: All of the prompt.
            expected_tokens: What must have been restored; None: anything.
        """
        try:
            for prefill in prefills:
                restored = prefill.clock.cached_tokens
                require(restored > 0, f"Nothing was restored: {prefill.clock.miss_reason}.")
                require(
                    expected_tokens in (None, restored),
                    f"{restored} tokens were restored, not {expected_tokens}.",
                )
                prefill.run()
            self._follow(tally, [prefill.cache for prefill in prefills])
            for prefill in prefills:
                prefill.store(self._reference.tokens[:-1])
        finally:
            for prefill in prefills:
                prefill.release()
        bank.check()
        return {
            "restored tokens": prefills[0].clock.cached_tokens,
            "requests": len(prefills),
            "source": "memory",
        }

    def _runs_in_the_banks(self, prefill: PromptPrefill, bank: SessionBank) -> bool:
        views = bank.read(prefill.key, self._prompt, 0, self._shared) or []
        return bool(views) and all(view.buffer is prefill.cache.buffer for view in views)

    def _follow(self, tally: Tally, caches: Sequence[PromptCache]) -> None:
        """Read the answer into caches that hold the prompt, taking turns."""
        for cache in caches:
            tally.add(len(self._prompt) - 1, cache.logits)
        for token in self._reference.answer[:-1]:
            for cache in caches:
                self._model.decode(cache, 0, token_ids=(token,))
                tally.add(cache.offset - 1, cache.logits)

    def _streams(self) -> list[PromptCache]:
        """Return the state of two short prefixes of the prompt."""
        streams = []
        for length in (3, len(self._prompt) // 4):
            cache = self._model.new_cache()
            self._model.prefill(cache, self._prompt[:length])
            streams.append(cache)
        return streams

    def _step(
        self,
        decoder: BatchDecoder,
        caches: Sequence[PromptCache],
        tally: Tally,
        span: SharedSpan | None = None,
    ) -> None:
        following = [self._reference.tokens[cache.offset] for cache in caches]
        for problem in decoder.decode(caches, following, span).values():
            raise problem
        for cache in caches:
            tally.add(cache.offset - 1, cache.logits)

    # -- disk -------------------------------------------------------------------

    def _write_to(self, folder: Path) -> int:
        bank = SessionBank()
        self._keep(self._other, bank)
        tier = _open(folder)
        try:
            work = self._disk_work(bank, tier, threading.Event())
            work.keep(self._model.state_key, self._other)
            while not work.idle:
                work.step()
                # One piece at a time waits, whatever the state weighs.
                require(tier.flush(_DISK_WAIT_S), "Writing took too long.")
            stats = tier.stats()
        finally:
            tier.close()
        require(not stats.dropped, f"Not all was written: {dict(stats.dropped)}.")
        return stats.bytes_written

    def _read_from(self, folder: Path, bank: SessionBank) -> int:
        tier = _open(folder)
        try:
            came = threading.Event()
            work = self._disk_work(bank, tier, came)
            tokens = np.asarray(self._prompt, np.int32)
            fetching = work.fetch("verify", self._model.state_key, tokens, 0)
            require(fetching, "The disk had nothing of the prompt.")
            require(came.wait(_DISK_WAIT_S), "Reading took too long.")
            while not work.idle:
                work.step()
            return tier.stats().bytes_read
        finally:
            tier.close()

    def _disk_work(
        self, bank: SessionBank, tier: DiskTier, came: threading.Event
    ) -> DiskWork:
        # Reading counts as the faster way, whatever it takes: it is what is tried here.
        return DiskWork(self._model, bank, tier, came.set, lambda start, end: math.inf)


def _open(folder: Path) -> DiskTier:
    return DiskTier(folder, max_bytes=_UNLIMITED_BYTES, daily_write_bytes=_UNLIMITED_BYTES)
