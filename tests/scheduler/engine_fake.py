"""An engine without a model: it stores which prompt indices it computed for whom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import StepCost
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import Ended, Step, StepResult


class EngineFake:
    """Drives a scheduler; ``cuts`` holds the edges and atomic ranges of each prompt.

    A decode takes ``decode_s`` and a span ``token_s`` for each token, unless ``cost``
    says what both take.
    """

    def __init__(
        self,
        decode_s: float = 0.01,
        token_s: float = 0.001,
        cost: StepCost | None = None,
        **settings,
    ) -> None:
        self.scheduler = Scheduler(SchedulerConfig(**settings))
        self.cost = cost or StepCost(
            decode_s=decode_s, span_token_s=token_s, shared_token_s=token_s
        )
        self.cuts = {}
        self.cached = defaultdict(int)
        self.prompt_tokens = {}
        self.computed = defaultdict(list)
        self.decoded = defaultdict(int)
        self.steps: list[Step] = []
        self.ended: list[Ended] = []

    def add(self, request_id, prompt_tokens, *, cached=0, edges=(), atomic=(), **options):
        self.scheduler.add(
            request_id, prompt_tokens=prompt_tokens, cached_tokens=cached, **options
        )
        self.prompt_tokens[request_id] = prompt_tokens
        self.cuts[request_id] = (edges, atomic)
        self.cached[request_id] = cached

    def start(self) -> None:
        while (request_id := self.scheduler.next_to_start()) is not None:
            edges, atomic = self.cuts[request_id]
            self.scheduler.start(request_id, self.cached[request_id], edges, atomic)

    def run(
        self,
        *,
        failed: Collection[str] = (),
        finished: Collection[str] = (),
        undone_spans: Collection[int] = (),
        decode_fails: bool = False,
    ) -> Step:
        """Run one iteration. Spans of failed requests, those numbered in
        ``undone_spans``, and what follows them in their prompt are not computed."""
        self.start()
        step = self.scheduler.schedule()
        self.steps.append(step)
        stopped = set(failed)
        seconds: list[float | None] = []
        decode_s = self.cost.of_decode(len(step.decoding), step.decode_depth_tokens)
        for number, span in enumerate(step.spans):
            if number in undone_spans or (span.shared and decode_fails):
                stopped.add(span.request_id)
            if span.request_id in stopped:
                seconds.append(None)
            else:
                took_s = self.cost.of_span(span.start, span.tokens, shared=span.shared)
                decode_s += took_s if span.shared else 0.0
                seconds.append(0.0 if span.shared else took_s)
                self.computed[span.request_id].extend(range(span.start, span.end))
        decodes = step.decoding and not decode_fails
        if decodes:
            for request_id in step.decoding:
                self.decoded[request_id] += 1
        result = StepResult(
            decode_s=decode_s if decodes else None,
            span_s=tuple(seconds),
            finished=frozenset(finished),
            failed=frozenset(failed),
        )
        self.ended += self.scheduler.apply(step, result)
        self.scheduler.check()
        return step

    def run_until_decoding(self, request_id: str, most: int = 1000) -> int:
        """Run until a prompt is complete; return how many iterations it took."""
        for count in range(most):
            if self.scheduler.state(request_id) == "decoding":
                return count
            self.run()
        raise AssertionError(f"{request_id} did not get its prompt in {most} iterations")

    def spans(self, request_id: str) -> list[tuple[int, int]]:
        """All spans scheduled for a request."""
        return [
            (s.start, s.end)
            for t in self.steps
            for s in t.spans
            if s.request_id == request_id
        ]
