"""Computes one step that the scheduler decided: forwards, tokens, events.

All decodes first, with the span that shares their forward, then the other spans. Tokens
of all rows are chosen together and sent one by one; a request that fails fails alone.
What may wait until the events are out is ``core.py``'s. Engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import mlx.core as mx

from mtplx.engine.running import RunningRequest
from mtplx.models.batch import BatchDecoder, SharedSpan
from mtplx.scheduler.itl import ItlRecorder
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import PrefillSpan, Stall, Step, StepResult

logger = logging.getLogger(__name__)


class Stepper:
    """Runs steps.

    Args:
        decoder: Runs a decode of several streams.
        scheduler: Asked what a shared span is expected to cost.
        gaps: Gets the gaps between tokens.
        running: The requests that have started; those that end are taken out.

    Attributes:
        gap_target_s: Longest gap that is aimed at; None without a target.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        scheduler: Scheduler,
        gaps: ItlRecorder,
        running: dict[str, RunningRequest],
    ) -> None:
        self._decoder = decoder
        self._scheduler = scheduler
        self._gaps = gaps
        self._running = running
        self.gap_target_s: float | None = None

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
        begin_s = time.perf_counter()
        if step.decoding:
            shared = spans.pop(0) if spans and spans[0].shared else None
            self._decode(step.decoding, shared, failed)
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
            decode_s=decode_s if step.decoding else None,
            span_s=tuple(seconds),
            finished=frozenset(finished),
            failed=frozenset(failed),
        )

    def _decode(
        self, request_ids: Sequence[str], shared: PrefillSpan | None, failed: set[str]
    ) -> None:
        """Decode every stream, and compute a span in the same forward if given."""
        streams = [self._running[request_id] for request_id in request_ids]
        rows = [*request_ids]
        span = None
        if shared is not None:
            rows.append(shared.request_id)
            prefill = self._running[shared.request_id].prefill
            tokens = prefill.prompt.token_ids[shared.start : shared.end]
            span = SharedSpan(prefill.cache, tokens, shared.is_tail)
        begin_s = time.perf_counter()
        try:
            failures = self._decoder.decode(
                [stream.prefill.cache for stream in streams],
                [stream.last_token for stream in streams],
                span,
            )
        except Exception as error:  # a bug; the requests that are not in this step go on
            failures = dict.fromkeys(range(len(rows)), error)
        took_s = time.perf_counter() - begin_s
        for index, problem in failures.items():
            self._fail(rows[index], problem, failed)
        if shared is not None:
            if shared.request_id not in failed:
                try:
                    prefill.computed(shared.tokens, took_s)
                    self._running[shared.request_id].tell_progress()
                except Exception as error:  # it may take a snapshot
                    self._fail(shared.request_id, error, failed)
            if not shared.is_tail:
                rows.pop()
        self._choose_tokens([r for r in rows if r not in failed], failed)

    def _run_span(self, span: PrefillSpan, failed: set[str]) -> None:
        try:
            running = self._running[span.request_id]
            running.prefill.run(span.end)
            running.tell_progress()
        except Exception as error:
            self._fail(span.request_id, error, failed)
        else:
            if span.is_tail:
                self._choose_tokens([span.request_id], failed)

    def _choose_tokens(self, request_ids: Sequence[str], failed: set[str]) -> None:
        """Choose a token for each request, compute them together, send them one by one."""
        drawn: dict[str, mx.array] = {}
        for request_id in request_ids:
            running = self._running[request_id]
            if running.only_reads:
                continue
            try:
                drawn[request_id] = running.draw()
            except Exception as error:
                self._fail(request_id, error, failed)
        try:
            mx.eval(list(drawn.values()))
        except Exception:
            logger.exception("Tokens could not be chosen together; they are chosen alone")
        for request_id, token in drawn.items():
            try:
                running = self._running[request_id]
                gap_s = running.accept(int(token), self.gap_target_s)
            except Exception as error:
                self._fail(request_id, error, failed)
            else:
                if gap_s is not None:
                    self._gaps.record(gap_s, self.gap_target_s)

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
        running.prefill.release(broken=running.broken)
        running.fail(error)
        failed.add(request_id)
