"""Runs the very scheduler of the server on a trace of arrivals and a cost of steps.

Owns simulated time and what the engine would do between ``schedule`` and ``apply``; every
decision is the scheduler's. Pure Python, single-threaded.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from mtplx.errors import ConfigError, InvalidRequestError, QueueFullError
from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import StepCost
from mtplx.scheduler.itl import percentile
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import PrefillSpan, Stall, Step, StepResult, Why


@dataclass(frozen=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at_s: When it arrives.
        prompt_tokens: Length of its prompt.
        new_tokens: Tokens it generates, at least 1.
        cached_tokens: Prompt tokens that are restored when it starts.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.cached_tokens < self.prompt_tokens and self.new_tokens > 0):
            raise ConfigError(
                f"{self} is no request: it needs at least one prompt token that is not "
                "cached and one new token."
            )


@dataclass
class Served:
    """What became of one arrival. ``token_times_s`` is when each token went out;
    ``refusal`` is why it was not admitted, or None."""

    name: str
    arrival: Arrival
    token_times_s: list[float] = field(default_factory=list)
    stall: Stall = field(default_factory=Stall)
    refusal: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to first token; None when it has none."""
        return self.token_times_s[0] - self.arrival.at_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [after - before for before, after in pairwise(self.token_times_s)]


@dataclass(frozen=True)
class Iteration:
    """One iteration: when it began, its decode, and its spans with their seconds."""

    start_s: float
    decode_rows: int
    decode_s: float
    spans: tuple[tuple[PrefillSpan, float], ...]
    why: Why

    @property
    def end_s(self) -> float:
        """When it ended."""
        return self.start_s + self.decode_s + sum(seconds for _, seconds in self.spans)


@dataclass(frozen=True)
class Simulation:
    """A finished run."""

    served: tuple[Served, ...]
    iterations: tuple[Iteration, ...]

    @property
    def end_s(self) -> float:
        """When the last iteration ended."""
        return self.iterations[-1].end_s if self.iterations else 0.0

    @property
    def gaps_s(self) -> list[float]:
        """All gaps between tokens of one request, ascending."""
        return sorted(gap for request in self.served for gap in request.gaps_s)

    def gap_s(self, share: float) -> float | None:
        """The gap that ``share`` of all gaps do not exceed; None without any."""
        gaps = self.gaps_s
        return percentile(gaps, share) if gaps else None


def simulate(
    config: SchedulerConfig, cost: StepCost, arrivals: Iterable[Arrival]
) -> Simulation:
    """Serve the arrivals until none is left, in simulated time from 0."""
    scheduler = Scheduler(config)
    served = [
        Served(f"r{i}", arrival)
        for i, arrival in enumerate(sorted(arrivals, key=lambda a: a.at_s))
    ]
    by_name = {request.name: request for request in served}
    coming = deque(served)
    iterations: list[Iteration] = []
    now_s = 0.0
    while True:
        while coming and coming[0].arrival.at_s <= now_s:
            _admit(scheduler, coming.popleft())
        while (name := scheduler.next_to_start()) is not None:
            scheduler.start(name, by_name[name].arrival.cached_tokens)
        step = scheduler.schedule()
        if step.is_empty:
            scheduler.apply(step, StepResult())
            if not coming:
                return Simulation(tuple(served), tuple(iterations))
            now_s = coming[0].arrival.at_s
            continue
        iteration = _timed(step, cost, now_s)
        iterations.append(iteration)
        finished = _send_tokens(iteration, step, by_name)
        result = StepResult(
            decode_s=iteration.decode_s if step.decoding else None,
            span_s=tuple(seconds for _, seconds in iteration.spans),
            finished=frozenset(finished),
        )
        for ended in scheduler.apply(step, result):
            by_name[ended.request_id].stall = ended.stall
        now_s = iteration.end_s


def read_trace(path: Path) -> list[Arrival]:
    """Read arrivals, one JSON object a line with the fields of ``Arrival``.

    Raises:
        ConfigError: A line is not an arrival; the message says which.
    """
    arrivals = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The trace {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrivals.append(Arrival(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Line {number} of the trace {path}: {error}") from None
    return arrivals


def _admit(scheduler: Scheduler, request: Served) -> None:
    arrival = request.arrival
    try:
        scheduler.add(
            request.name,
            prompt_tokens=arrival.prompt_tokens,
            cached_tokens=arrival.cached_tokens,
        )
    except (QueueFullError, InvalidRequestError) as error:
        request.refusal = str(error)


def _timed(step: Step, cost: StepCost, now_s: float) -> Iteration:
    """Say how long each part takes; the first part bears the cost of the iteration."""
    decode_s = cost.of_decode(len(step.decoding), step.decode_depth_tokens)
    spans = [cost.of_span(span.start, span.tokens) for span in step.spans]
    if step.decoding:
        decode_s += cost.iteration_s
    else:
        spans[0] += cost.iteration_s
    timed = tuple(zip(step.spans, spans, strict=True))
    return Iteration(now_s, len(step.decoding), decode_s, timed, step.why)


def _send_tokens(iteration: Iteration, step: Step, by_name: dict[str, Served]) -> list[str]:
    """Note when each token goes out; return the requests that have all of theirs."""
    now_s = iteration.start_s + iteration.decode_s
    sent = [(name, now_s) for name in step.decoding]
    for span, seconds in iteration.spans:
        now_s += seconds
        if span.is_tail:
            sent.append((span.request_id, now_s))
    for name, at_s in sent:
        by_name[name].token_times_s.append(at_s)
    names = (name for name, _ in sent)
    return [
        name
        for name in names
        if len(by_name[name].token_times_s) == by_name[name].arrival.new_tokens
    ]
