"""Decides what each iteration computes: all decodes, then prefill spans.

Owns the state of every request from ``add`` to its one ``Ended``, the queue, and the
learned cost of a step. It never runs a model, reads a clock or knows a token; the engine
thread, the only one that calls it, does that between ``schedule`` and ``apply``::

    while (request_id := scheduler.next_to_start()) is not None:
        ... restore what the SessionBank has ...
        scheduler.start(request_id, cached_tokens, edges, atomic_ranges)
    step = scheduler.schedule()
    ... decode step.decoding, send the tokens, compute step.spans ...
    ended = scheduler.apply(step, result)

Who prefills first: aged prompts in order of arrival, then the fewest tokens left.

How long a prompt can wait: let U be its uncached tokens, B those left of the requests
that came before it, N ``max_num_partial_prefills``. It ages when 4 U tokens were computed
for others (``OVERTAKING_LIMIT``); from then on only those that came before it go ahead,
and, until one of the N places is free, prompts that were started in the meantime, each
shorter than it. Each iteration with a started prompt computes ``min_prefill_tokens``, or
completes every started prompt, or ends at a piece that the next one computes whole. So
with a seat free the prompt is complete after ``(B + (5 + N) U) / min_prefill_tokens``
iterations, and one more for each prompt and each atomic range ahead.

Invariants, held by ``check``: each request is in exactly one of waiting, prefilling and
decoding; those running are at most ``max_num_seqs``; ``num_computed_tokens`` moves in
``apply`` alone, and only over spans reported as computed, in order.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

from mtplx.errors import QueueFullError
from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import CostModel
from mtplx.scheduler.request import Request, State
from mtplx.scheduler.spans import SpanChooser
from mtplx.scheduler.step import Ended, Outcome, Stall, Step, StepResult
from mtplx.scheduler.waiting import WaitingQueue, aged_at


class Scheduler:
    """The token-budgeted scheduler.

    Attributes:
        config: The settings.
        costs: The learned cost of a step.
    """

    def __init__(self, config: SchedulerConfig, costs: CostModel | None = None) -> None:
        self.config = config
        self.costs = CostModel() if costs is None else costs
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._prefilling: dict[str, Request] = {}
        self._decoding: dict[str, Request] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._arrivals = 0
        self._served_tokens = 0
        self._in_flight: Step | None = None

    def add(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        cached_tokens: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """Let a request wait for its turn.

        Args:
            request_id: Unique among the requests that have not ended.
            prompt_tokens: Length of the prompt, at least 1.
            cached_tokens: Prompt tokens expected to be restored, for the order.
            deadline_s: When the request expires, on the clock given to ``expire``.

        Raises:
            QueueFullError: Too many wait; nothing was changed.
            InvalidRequestError: The prompt must be computed whole and is too long.
        """
        assert request_id not in self._requests, f"{request_id} is in the scheduler"
        assert prompt_tokens > 0
        self.config.check_prompt(prompt_tokens)
        if self.waiting >= self.config.max_waiting(self.running):
            raise QueueFullError(
                f"{self.waiting} requests wait already. Try again later.",
                retry_after_s=self.retry_after_s(),
            )
        request = Request(
            request_id, self._arrivals, prompt_tokens, 0, self._served_tokens, deadline_s
        )
        request.expect_cached(cached_tokens)
        self._arrivals += 1
        self._requests[request_id] = request
        self._waiting.push(request)
        if deadline_s is not None:
            insort(self._deadlines, (deadline_s, request.number, request_id))

    def expect_cached(self, request_id: str, cached_tokens: int) -> None:
        """Correct how much of a waiting prompt is expected to be restored; a held request
        is held no longer."""
        request = self._requests[request_id]
        assert request.state is State.WAITING
        self._waiting.remove(request)
        request.expect_cached(cached_tokens)
        self._waiting.push(request)

    def expected_cached(self, request_id: str) -> int:
        """Return how much of a waiting prompt is expected to be restored."""
        return self._requests[request_id].num_computed_tokens

    def hold(self, request_id: str) -> None:
        """Let nothing start a waiting request until ``expect_cached`` is called for it.

        For one whose prompt another request is reading, or whose state is being fetched.
        """
        request = self._requests[request_id]
        assert request.state is State.WAITING
        self._waiting.hold(request)

    def next_to_start(self) -> str | None:
        """Return the waiting request that should start now, or None.

        It starts when a seat is free and either it goes before every started prompt, or
        those may all be complete within one iteration.
        """
        request = self._waiting.head(self._served_tokens)
        partial = self._prefilling.values()
        if (
            request is None
            or self.running >= self.config.max_num_seqs
            or len(partial) >= self.config.max_num_partial_prefills
        ):
            return None
        left = sum(r.remaining_tokens for r in partial)
        first = all(self._rank(request) < self._rank(r) for r in partial)
        return request.request_id if first or left < self._most_prefill_tokens() else None

    def start(
        self,
        request_id: str,
        cached_tokens: int = 0,
        edges: Sequence[int] = (),
        atomic_ranges: Sequence[tuple[int, int]] = (),
        *,
        alone: bool = False,
    ) -> None:
        """Begin the prefill of a waiting request.

        Args:
            request_id: As ``next_to_start`` gave it.
            cached_tokens: Prompt tokens that were restored, fewer than the prompt.
            edges: Indices where a span must end.
            atomic_ranges: Disjoint half-open ranges that no span may split.
            alone: Its spans must not share the forward of a decode.
        """
        request = self._requests[request_id]
        assert request.state is State.WAITING
        self._waiting.remove(request)
        request.expect_cached(cached_tokens)
        request.alone = alone
        if self.config.enable_chunked_prefill:
            request.set_cuts(edges, atomic_ranges)
        else:
            request.set_cuts((), ((cached_tokens, request.prompt_tokens),))
        request.state = State.PREFILLING
        self._prefilling[request_id] = request

    def schedule(self) -> Step:
        """Decide the next iteration. Changes nothing until ``apply``."""
        assert self._in_flight is None, "the last step was not applied"
        chooser = SpanChooser(
            self.config,
            self.costs,
            rows=len(self._decoding),
            depth_tokens=sum(r.depth_tokens for r in self._decoding.values()),
        )
        for request in sorted(self._prefilling.values(), key=self._rank):
            chooser.take(request)
        self._in_flight = chooser.step(tuple(self._decoding))
        return self._in_flight

    def apply(self, step: Step, result: StepResult) -> tuple[Ended, ...]:
        """Advance by what was done, and return the requests that are over.

        Requests that ended since ``schedule`` are passed over.
        """
        assert step is self._in_flight, "this is not the step in flight"
        self._in_flight = None
        shared_s = 0.0
        if result.decode_s is not None:
            shared_s = self._learn_decode(step, result, result.decode_s)
        if result.decode_s is not None or result.under_way:
            for request_id in step.decoding:
                if request_id in self._decoding and request_id not in result.failed:
                    self._decoding[request_id].decoded_tokens += 1
        self._apply_spans(step, result, shared_s)
        seconds = [result.decode_s, *result.span_s]
        if step.decoding and None not in seconds and len(result.span_s) == len(step.spans):
            measured_s = math.fsum(s for s in seconds if s is not None)
            self.costs.observe_step(step.predicted_s, measured_s, spans=bool(step.spans))
        outcomes = dict.fromkeys(result.finished, Outcome.FINISHED)
        outcomes |= dict.fromkeys(result.failed, Outcome.FAILED)
        ended = [self.end(request_id, outcome) for request_id, outcome in outcomes.items()]
        return tuple(record for record in ended if record is not None)

    def end(self, request_id: str, outcome: Outcome) -> Ended | None:
        """End a request in any state; None when it is over already.

        For a client that left, or a failure outside of a step. Allowed at any time.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if request.state is State.WAITING:
            self._waiting.remove(request)
            request.num_computed_tokens = 0  # What was expected was not restored.
        self._prefilling.pop(request_id, None)
        self._decoding.pop(request_id, None)
        if request.deadline_s is not None:
            self._deadlines.remove((request.deadline_s, request.number, request_id))
        return Ended(
            request_id,
            outcome,
            request.num_computed_tokens,
            request.decoded_tokens,
            request.stall,
        )

    @property
    def next_deadline_s(self) -> float:
        """When the next request expires, on the clock given to ``expire``; infinite
        where none does."""
        return self._deadlines[0][0] if self._deadlines else math.inf

    def expire(self, now_s: float) -> tuple[Ended, ...]:
        """End and return the requests whose deadline has passed."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            ended.append(self.end(self._deadlines[0][2], Outcome.EXPIRED))
        return tuple(record for record in ended if record is not None)

    def stall(self, request_id: str) -> Stall:
        """Return what a request has suffered and caused so far."""
        return self._requests[request_id].stall

    def state(self, request_id: str) -> State | None:
        """Return where a request stands; None when it is over."""
        request = self._requests.get(request_id)
        return None if request is None else request.state

    @property
    def waiting(self) -> int:
        """Requests that have not started."""
        return len(self._waiting)

    @property
    def ready(self) -> int:
        """Waiting requests that are not held."""
        return self._waiting.ready

    @property
    def running(self) -> int:
        """Requests that prefill or decode."""
        return len(self._prefilling) + len(self._decoding)

    def check(self) -> None:
        """Assert the invariants."""
        self._waiting.check()
        groups = {
            State.WAITING: {r.request_id for r in self._waiting},
            State.PREFILLING: set(self._prefilling),
            State.DECODING: set(self._decoding),
        }
        assert sum(map(len, groups.values())) == len(self._requests)
        for request_id, request in self._requests.items():
            assert request_id in groups[request.state]
            assert 0 <= request.num_computed_tokens <= request.prompt_tokens
            complete = request.remaining_tokens == 0
            assert complete == (request.state is State.DECODING)
        assert self.running <= self.config.max_num_seqs
        assert len(self._prefilling) <= self.config.max_num_partial_prefills
        dated = [r for r in self._requests.values() if r.deadline_s is not None]
        assert {d[2] for d in self._deadlines} == {r.request_id for r in dated}

    def _learn_decode(self, step: Step, result: StepResult, decode_s: float) -> float:
        """Learn what a decode took; return the seconds that a span added to it."""
        rows, depth_tokens = len(step.decoding), step.decode_depth_tokens
        if not step.spans or not step.spans[0].shared:
            self.costs.observe_decode(rows, depth_tokens, decode_s)
            return 0.0
        if not result.span_s or result.span_s[0] is None:
            return 0.0  # Nobody knows what part of it failed.
        span = step.spans[0]
        added_s = self.shared_span_s(step, decode_s)
        shared = (span.start, span.tokens)
        self.costs.observe_decode(rows, depth_tokens, decode_s, shared=shared)
        return added_s

    def shared_span_s(self, step: Step, decode_s: float) -> float:
        """Return what a span added to the forward of a decode, in seconds.

        Only their sum is measured; it is divided as the model expects it to be.
        """
        span = step.spans[0]
        span_s = self.costs.cost.of_span(span.start, span.tokens, shared=True)
        rows_s = self.costs.cost.of_decode(len(step.decoding), step.decode_depth_tokens)
        return decode_s * span_s / (span_s + rows_s) if span_s else 0.0

    def _apply_spans(self, step: Step, result: StepResult, shared_s: float) -> None:
        streams = [self._decoding[r] for r in step.decoding if r in self._decoding]
        for span, seconds in zip(step.spans, result.span_s, strict=False):
            if seconds is None:
                continue
            if span.shared:
                seconds = shared_s
            else:
                self.costs.observe_span(span.start, span.tokens, seconds)
            self._served_tokens += span.tokens
            for stream in streams:
                stream.suffered_s += seconds
            request = self._prefilling.get(span.request_id)
            if request is None:
                continue
            assert span.start == request.num_computed_tokens, "a span was left out"
            request.num_computed_tokens = span.end
            request.served_to_it += span.tokens
            request.caused_s += seconds if streams else 0.0
            if span.is_tail:
                request.state = State.DECODING
                self._decoding[span.request_id] = self._prefilling.pop(span.request_id)
                streams.append(request)

    def _rank(self, request: Request) -> tuple[bool, int, int]:
        others = self._served_tokens - request.served_to_it
        aged = others >= aged_at(request)
        return (not aged, 0 if aged else request.remaining_tokens, request.number)

    def _most_prefill_tokens(self) -> int:
        return self.config.max_num_batched_tokens - len(self._decoding)

    def retry_after_s(self) -> float:
        """Return seconds until the prompts now waiting are read, between 1 and 60."""
        window = self.config.prefill_window
        token_s = self.costs.cost.of_span(0, window) / window
        return min(max(self._waiting.uncached_tokens * token_s, 1.0), 60.0)
