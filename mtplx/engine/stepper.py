"""Computes one step that the scheduler decided: forwards, tokens, events.

All decodes first, with the span that shares their forward, then the other spans. Tokens
of all rows are chosen together and sent one by one; a request that fails fails alone.

Where the device computes beside the host, the next forward is handed to it before the
tokens of the last one are read: it takes them as they are, uncomputed, and the host
reads, decodes and sends them while it runs. What a stream computed beyond its end is
dropped. Before spans of their own the tokens are read at once, so that no stream waits
for a span with a token that is there.

What may wait until the events are out is ``core.py``'s. Engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from mtplx.engine.running import RunningRequest
from mtplx.engine.sampling import Draw, draw_tokens
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache
from mtplx.models.forward import Forward, SharedSpan
from mtplx.scheduler.itl import ItlRecorder
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import Outcome, PrefillSpan, Stall, Step, StepResult

logger = logging.getLogger(__name__)


@dataclass
class _Drawn:
    """Tokens that were drawn and not read yet.

    Attributes:
        streams: Whose they are.
        tokens: ``[n]`` int32.
        forward: What they were drawn from; None for those of a prompt.
    """

    streams: list[RunningRequest]
    tokens: mx.array
    forward: Forward | None


class Stepper:
    """Runs steps.

    Args:
        decoder: Runs a decode of the streams.
        scheduler: Asked what a shared span is expected to cost.
        gaps: Gets the gaps between tokens.
        running: The requests that have started; those that end are taken out.
        overlaps: The device computes beside the host.

    Attributes:
        gap_target_s: Longest gap that is aimed at; None without a target.
        overlapped_steps: Decodes that began before the tokens of the last were read.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        scheduler: Scheduler,
        gaps: ItlRecorder,
        running: dict[str, RunningRequest],
        *,
        overlaps: bool,
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._gaps = gaps
        self._running = running
        self._overlaps = overlaps
        self._unread: _Drawn | None = None
        self._read_s = 0.0
        self.gap_target_s: float | None = None
        self.overlapped_steps = 0

    @property
    def tokens_ahead(self) -> int:
        """Tokens of each stream that are drawn and not read."""
        return 0 if self._unread is None else 1

    def run(self, step: Step, over: list[RunningRequest]) -> StepResult:
        """Decode, send, then compute the spans.

        Args:
            step: What to do.
            over: Gets the requests whose end was told to their clients.
        """
        failed: set[str] = set()
        finished: set[str] = set()
        spans = list(step.spans)
        span_s: dict[str, float] = {}
        seconds: list[float | None] = []
        if self._unread is not None:
            known = {id(stream) for stream in self._unread.streams}
            streams = [id(self._running[request_id]) for request_id in step.decoding]
            if not streams or not known.issuperset(streams):
                self.read_ahead(over)  # Those of the last step have left.
        begin_s = time.perf_counter()
        decode_s, under_way = None, False
        if step.decoding:
            shared = spans.pop(0) if spans and spans[0].shared else None
            last_read_s = self._read_s if self._unread is not None else None
            drawn, forward = self._decode(step.decoding, shared, failed, over)
            if self._overlaps and not step.spans and forward.can_drop:
                self._unread, under_way = drawn, True
                # From one reading to the next is what a step takes.
                if last_read_s is not None:
                    decode_s = self._read_s - last_read_s
            else:
                self._read(drawn, failed)
                added_s = 0.0
                if shared is not None:
                    so_far_s = time.perf_counter() - begin_s
                    added_s = self._scheduler.shared_span_s(step, so_far_s)
                    span_s[shared.request_id] = added_s
                self._finish(step.decoding, finished, over, Stall(suffered_s=added_s))
                if shared is not None:
                    seconds.append(None if shared.request_id in failed else 0.0)
                    own = Stall(caused_s=added_s)
                    self._finish([shared.request_id], finished, over, own)
                decode_s = time.perf_counter() - begin_s
        for span in spans:
            if span.request_id in failed:
                seconds.append(None)
                continue
            begin_s = time.perf_counter()
            self._run_span(span, failed)
            took_s = time.perf_counter() - begin_s
            seconds.append(None if span.request_id in failed else took_s)
            if step.decoding:
                span_s[span.request_id] = span_s.get(span.request_id, 0.0) + took_s
            if span.is_tail:
                own = Stall(caused_s=span_s.get(span.request_id, 0.0))
                self._finish([span.request_id], finished, over, own)
        return StepResult(
            decode_s=decode_s,
            span_s=tuple(seconds),
            finished=frozenset(finished),
            failed=frozenset(failed),
            under_way=under_way,
        )

    def read_ahead(self, over: list[RunningRequest]) -> None:
        """Read and send the tokens that are drawn and not read; the scheduler is told at
        once who is over.

        Args:
            over: Gets the requests whose end was told to their clients.
        """
        if self._unread is None:
            return
        drawn, self._unread = self._unread, None
        failed: set[str] = set()
        finished: set[str] = set()
        self._read(drawn, failed)
        request_ids = [stream.request.request_id for stream in drawn.streams]
        self._finish(request_ids, finished, over, Stall())
        for request_id in finished:
            self._scheduler.end(request_id, Outcome.FINISHED)
        for request_id in failed:
            self._scheduler.end(request_id, Outcome.FAILED)

    def forget(self, running: RunningRequest) -> None:
        """Let nothing that is under way count for a request that is over."""
        if self._unread is not None and self._unread.forward is not None:
            self._unread.forward.drop(running.prefill.cache)

    # -- decodes ----------------------------------------------------------------

    def _decode(
        self,
        request_ids: Sequence[str],
        shared: PrefillSpan | None,
        failed: set[str],
        over: list[RunningRequest],
    ) -> tuple[_Drawn, Forward]:
        """Begin a decode of every stream, and of a span in the same forward if given;
        read what the last one drew; draw."""
        streams = [self._running[request_id] for request_id in request_ids]
        rows = [*request_ids]
        span = None
        if shared is not None:
            rows.append(shared.request_id)
            prefill = self._running[shared.request_id].prefill
            tokens = prefill.prompt.token_ids[shared.start : shared.end]
            span = SharedSpan(prefill.cache, tokens, shared.is_tail)
        begin_s = time.perf_counter()
        caches = [stream.prefill.cache for stream in streams]
        forward = self._decoder.begin(caches, self._next_tokens(streams), span)
        if self._overlaps:
            mx.async_eval(forward.logits, forward.state)
        if self._unread is not None:
            self.overlapped_steps += 1
            self.read_ahead(over)
            for request_id, cache in zip(request_ids, caches, strict=True):
                if request_id not in self._running:
                    forward.drop(cache)
        for index, problem in forward.failures.items():
            if rows[index] in self._running:
                self._fail(rows[index], problem, failed)
        drawn = self._draw(
            [
                (request_id, row)
                for request_id, row in zip(rows, forward.rows, strict=True)
                if request_id in self._running
                and (shared is None or request_id != shared.request_id or shared.is_tail)
            ],
            forward.logits,
            failed,
            forward,
        )
        if shared is not None and shared.request_id not in failed:
            try:
                # A snapshot may be taken, which waits for the forward.
                lost = self._decoder.finish(forward)
                if lost is None:
                    prefill.computed(shared.tokens, time.perf_counter() - begin_s)
                    self._running[shared.request_id].tell_progress()
            except Exception as error:
                self._fail(shared.request_id, error, failed)
        return drawn, forward

    def _next_tokens(self, streams: Sequence[RunningRequest]) -> list[int] | mx.array:
        """Return what each stream reads next, uncomputed where it is not read yet."""
        drawn = self._unread
        if drawn is None:
            return [stream.last_token for stream in streams]
        places = {id(stream): place for place, stream in enumerate(drawn.streams)}
        wanted = [places[id(stream)] for stream in streams]
        if wanted == [*range(len(drawn.streams))]:
            return drawn.tokens
        return drawn.tokens[mx.array(wanted)]

    def _draw(
        self,
        rows: Sequence[tuple[str, int]],
        logits: mx.array,
        failed: set[str],
        forward: Forward | None,
    ) -> _Drawn:
        """Draw a token for each request from its row of the logits ``[n, vocab]``."""
        draws: list[Draw] = []
        streams: list[RunningRequest] = []
        wanted: list[int] = []
        for request_id, row in rows:
            running = self._running[request_id]
            if running.only_reads:
                continue
            try:
                draws.append(running.draw())
            except Exception as error:
                self._fail(request_id, error, failed)
            else:
                streams.append(running)
                wanted.append(row)
        if not streams:
            return _Drawn([], mx.zeros((0,), mx.int32), forward)
        if wanted != [*range(len(logits))]:
            logits = logits[mx.array(wanted)]
        tokens = draw_tokens(logits, draws)
        for index, running in enumerate(streams):
            if running.request.logprobs is not None:
                mine = slice(index, index + 1)
                tokens = running.scored(logits[mine], tokens[mine], tokens)
        if self._overlaps:
            mx.async_eval(tokens)
        return _Drawn(streams, tokens, forward)

    def _read(self, drawn: _Drawn, failed: set[str]) -> None:
        """Wait for drawn tokens and send them one by one."""
        forward = drawn.forward
        lost: Exception | None = None
        touched: list[PromptCache] = []
        tokens: list[int] = []
        try:
            mx.eval(drawn.tokens, [] if forward is None else forward.state)
            tokens = cast(list[int], drawn.tokens.tolist())
        except Exception as error:
            lost = error
        if forward is not None:
            touched = forward.touched
            lost = self._decoder.finish(forward) or lost
        self._read_s = time.perf_counter()
        if lost is not None:
            for request_id, running in [*self._running.items()]:
                if running in drawn.streams or running.prefill.cache in touched:
                    self._fail(request_id, lost, failed)
            return
        for running, token in zip(drawn.streams, tokens, strict=True):
            request_id = running.request.request_id
            if self._running.get(request_id) is not running:
                continue
            try:
                gap_s = running.accept(token, self.gap_target_s)
            except Exception as error:
                self._fail(request_id, error, failed)
            else:
                if gap_s is not None:
                    self._gaps.record(gap_s, self.gap_target_s)

    # -- spans ------------------------------------------------------------------

    def _run_span(self, span: PrefillSpan, failed: set[str]) -> None:
        try:
            running = self._running[span.request_id]
            running.prefill.run(span.end)
            running.tell_progress()
        except Exception as error:
            self._fail(span.request_id, error, failed)
        else:
            if span.is_tail:
                logits = running.prefill.cache.logits
                assert logits is not None
                rows = [(span.request_id, 0)]
                self._read(self._draw(rows, logits[None], failed, None), failed)

    # -- ends -------------------------------------------------------------------

    def _finish(
        self,
        request_ids: Sequence[str],
        finished: set[str],
        over: list[RunningRequest],
        this_step: Stall,
    ) -> None:
        """Send the end of those that have their last token, at once.

        Args:
            request_ids: Those that got a token.
            finished, over: Get those that are done.
            this_step: What the scheduler does not know of yet.
        """
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is None or not running.done:
                continue
            stall = self._scheduler.stall(request_id)
            running.finish(
                Stall(
                    stall.suffered_s + this_step.suffered_s,
                    stall.caused_s + this_step.caused_s,
                )
            )
            finished.add(request_id)
            over.append(self._running.pop(request_id))

    def _fail(self, request_id: str, error: Exception, failed: set[str]) -> None:
        """End one request with an error. Nothing more is kept of it than the bank has, and
        not even that where it computed no numbers."""
        running = self._running.pop(request_id)
        self.forget(running)
        running.prefill.release(broken=running.broken)
        running.fail(error)
        failed.add(request_id)
