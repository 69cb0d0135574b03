"""The values of the contract decide -> run -> apply.

The scheduler hands out a frozen ``Step``; the engine runs it and hands back a
``StepResult``; for each request that is over the scheduler gives one ``Ended``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class PrefillSpan:
    """Half-open range ``[start, end)`` of one prompt, computed by one forward.

    The last span of a prompt ``is_tail``: its logits give the first token. One that is
    ``shared`` is part of the decode's forward.
    """

    request_id: str
    start: int
    end: int
    is_tail: bool
    shared: bool = False

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return self.end - self.start


class Why(StrEnum):
    """What ended the choice of prefill spans in a step."""

    NOTHING_TO_PREFILL = "no prompt is started and incomplete"
    ALL_SCHEDULED = "every started prompt is complete after this step"
    TOKEN_BUDGET = "the token budget, or a limit in tokens, is used up"
    ITL_TARGET = "another span would miss the target for the token gap"
    GUARANTEED_SHARE = "prefill got its guaranteed share, beyond the target"
    WHOLE_PIECE = "a piece that must not be split runs alone"


@dataclass(frozen=True)
class Step:
    """What one iteration computes: first ``decoding``, then ``spans`` in order.

    Attributes:
        decoding: Requests that get one token each.
        decode_depth_tokens: Tokens in the caches of ``decoding``, together.
        spans: Prefill spans; those of one prompt are contiguous.
        why: What ended the choice of spans.
        target_s: Token gap aimed at, in seconds; None without stream or target.
        predicted_s: Seconds the cost model expects for the whole step.
    """

    decoding: tuple[str, ...]
    decode_depth_tokens: int
    spans: tuple[PrefillSpan, ...]
    why: Why
    target_s: float | None
    predicted_s: float

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.decoding and not self.spans

    @property
    def tokens(self) -> int:
        """Tokens computed, decodes and prefill together."""
        return len(self.decoding) + sum(span.tokens for span in self.spans)


@dataclass(frozen=True)
class StepResult:
    """What happened to a step. Work not reported as done did not happen.

    Attributes:
        decode_s: Seconds of the iteration that were not spent in spans of their own: the
            decode forward, a span that shared it, sampling, sending. None when the
            decode did not run, or nobody knows yet how long it takes.
        span_s: Seconds of each span of the step, in its order; None, or missing at the
            end, for a span that was not computed. It is scheduled again unless its
            request failed. For a span that shared the decode's forward 0 says that it
            was computed; its time is in ``decode_s``.
        finished: Requests that ended as they should (end token, length, stop string).
        failed: Requests that ended with an error.
        under_way: The decode was handed to the device, which still computes it.
    """

    decode_s: float | None = None
    span_s: tuple[float | None, ...] = ()
    finished: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    under_way: bool = False


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"
    EXPIRED = "expired"


@dataclass(frozen=True)
class Stall:
    """Seconds in which streams waited for somebody's prefill.

    Attributes:
        suffered_s: Time this request, as a stream, waited for spans of others.
        caused_s: Time spent in spans of this request while at least one stream waited,
            counted once however many waited.
    """

    suffered_s: float = 0.0
    caused_s: float = 0.0


@dataclass(frozen=True)
class Ended:
    """The one terminal record of a request.

    Attributes:
        num_computed_tokens: Prompt tokens whose state exists (restored or computed).
        decoded_tokens: Decode steps it took part in; the token sampled from the tail is
            not one of them.
        stall: What it suffered and caused.
    """

    request_id: str
    outcome: Outcome
    num_computed_tokens: int
    decoded_tokens: int
    stall: Stall
