"""How long a step takes: a small model fitted from the steps that were measured.

Seconds of a decode are linear in rows and cached tokens, and in the tokens of a span that
shares its forward; seconds of a span of its own in its tokens and in tokens times their
depth (attention reads what is cached). Both are fitted by least squares on the relative
error, in which older measurements fade, with coefficients that cannot be negative:
predictions then never shrink as work grows. A shared forward is fitted as the one
measurement it is; taking an expected decode off it would call spans free whenever the
machine has become faster. The fit is recursive: it keeps sums, no history, and costs
microseconds.

Pure; a ``CostModel`` belongs to its ``Scheduler``.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from mtplx.errors import ConfigError
from mtplx.scheduler.itl import percentile

FORGETTING = 0.98
"""Weight left to a measurement after each later one: about 50 of them count."""

GROWTH = 2
"""How far beyond the longest measured span a prediction is trusted. From spans of one
length nobody can tell a cost per span from a cost per token."""

_FIRST_SPAN = 16
"""Longest span, in tokens, before any was measured."""

_PRIOR_WEIGHT = 0.1  # Of one measurement: enough to start from, soon outvoted.
_TRUSTED_AFTER = 8  # Measurements until an odd one is taken for an outlier.
_OUTLIER = 3.0  # One measurement counts as at most this many times the prediction.
_CHANGED_AFTER = 4  # Outliers in a row: the machine changed, and the past is no guide.
_SPEED_SHARE = 0.15
"""How much of a step's error is taken for a change of the machine's speed (its clock,
its neighbours), which moves all costs at once and faster than the fit can follow."""

_FIRST_MARGIN = 1.2
_BEYOND = 1.03  # The worst of the next hundred steps is a little worse than of the last.
_MOST_MARGIN = 1.3  # Noise beyond it comes in spikes, which shorter spans do not avoid.


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step as a function of what it computes.

    Attributes:
        iteration_s: For each iteration, whatever it computes.
        decode_s: For each decode forward.
        decode_row_s: For each row of it.
        decode_depth_s: For each token in the caches of the rows.
        span_s: For each span.
        span_token_s: For each token of a span.
        span_depth_s: For each pair of a span's token and one before it.
        shared_token_s, shared_depth_s: The same two for a span that shares the forward
            of a decode: what it adds to it.
    """

    iteration_s: float = 0.0
    decode_s: float = 0.0
    decode_row_s: float = 0.0
    decode_depth_s: float = 0.0
    span_s: float = 0.0
    span_token_s: float = 0.0
    span_depth_s: float = 0.0
    shared_token_s: float = 0.0
    shared_depth_s: float = 0.0

    def of_decode(self, rows: int, depth_tokens: int) -> float:
        """Seconds of a decode of ``rows`` streams with ``depth_tokens`` cached in all."""
        if not rows:
            return 0.0
        return self.decode_s + rows * self.decode_row_s + depth_tokens * self.decode_depth_s

    def of_span(self, start: int, tokens: int, *, shared: bool = False) -> float:
        """Seconds of the span ``[start, start + tokens)``.

        Args:
            start: Where it begins.
            tokens: Its length.
            shared: It shares the forward of a decode: what it adds to that.
        """
        pairs = _pairs(start, tokens)
        if shared:
            return tokens * self.shared_token_s + pairs * self.shared_depth_s
        return self.span_s + tokens * self.span_token_s + pairs * self.span_depth_s

    def dumps(self) -> str:
        """Return JSON that ``read_step_cost`` reads."""
        return json.dumps(asdict(self), indent=2)


def read_step_cost(path: Path) -> StepCost:
    """Read a cost written by ``StepCost.dumps``; fields not given are 0.

    Raises:
        ConfigError: The file cannot be read, or is not a cost.
    """
    names = [field.name for field in fields(StepCost)]
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        cost = StepCost(**{name: float(values.pop(name, 0)) for name in names})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"The cost model {path} cannot be read: {error}") from None
    if values or min(asdict(cost).values()) < 0:
        raise ConfigError(
            f"The cost model {path} must hold non-negative seconds for any of "
            f"{', '.join(names)}, and nothing else."
        )
    return cost


PRIOR = StepCost(
    decode_s=0.06,
    decode_row_s=0.01,
    span_s=0.06,
    span_token_s=0.0045,
    shared_token_s=0.0045,
)
"""Before the first measurement: a 135M model on two CPU cores. On a faster machine the
first spans are short and then double until the measurements bind."""


class CostModel:
    """Learns the cost of steps, and how far to trust it."""

    def __init__(self, prior: StepCost = PRIOR) -> None:
        decode = (
            prior.decode_s,
            prior.decode_row_s,
            prior.decode_depth_s,
            prior.shared_token_s,
            prior.shared_depth_s,
        )
        span = (prior.span_s, prior.span_token_s, prior.span_depth_s)
        self._decode = _NonNegativeFit(decode, typical=(1, 4, 4096, 32, 32 * 1024))
        self._span = _NonNegativeFit(span, typical=(1, 64, 64 * 1024))
        self._ratios: deque[float] = deque(maxlen=128)
        self._speed = 1.0
        self._longest_tokens = {False: 0, True: 0}
        self.cost = prior

    def observe_decode(
        self,
        rows: int,
        depth_tokens: int,
        seconds: float,
        *,
        shared: tuple[int, int] = (0, 0),
    ) -> None:
        """Learn from one decode.

        Args:
            rows: Streams.
            depth_tokens: Tokens in their caches, together.
            seconds: Of the forward, and what goes with it.
            shared: Start and length of the span in the same forward, if there was one.
        """
        start, tokens = shared
        features = (1, rows, depth_tokens, tokens, _pairs(start, tokens))
        self._decode.observe(features, seconds)
        self._longest_tokens[True] = max(self._longest_tokens[True], tokens)
        self._refresh()

    def observe_span(self, start: int, tokens: int, seconds: float) -> None:
        """Learn from one span that had a forward of its own."""
        self._span.observe((1, tokens, _pairs(start, tokens)), seconds)
        self._longest_tokens[False] = max(self._longest_tokens[False], tokens)
        self._refresh()

    def observe_step(self, predicted_s: float, measured_s: float, *, spans: bool) -> None:
        """Learn how far a step with streams was from its prediction.

        Args:
            predicted_s: As the step was planned.
            measured_s: What it took.
            spans: It had prefill spans; only these are planned with a margin.
        """
        if predicted_s <= 0:
            return  # Too fast a model for the fit; there is no ratio to learn from.
        ratio = measured_s / predicted_s
        usual = min(max(ratio, 1 / _OUTLIER), _OUTLIER)
        self._speed = min(max(self._speed * usual**_SPEED_SHARE, 0.25), 4.0)
        self._refresh()
        if spans and self._decode.observed > _TRUSTED_AFTER:
            self._ratios.append(ratio)

    @property
    def error(self) -> float | None:
        """How far steps with spans usually are from their prediction: the median of
        ``abs(measured / predicted - 1)`` over recent ones; None before the first."""
        ratios = list(self._ratios)  # Other threads ask, too.
        if not ratios:
            return None
        return percentile(sorted(abs(ratio - 1) for ratio in ratios), 0.5)

    @property
    def margin(self) -> float:
        """Factor to plan with so that 99 of 100 steps keep to the plan in usual noise."""
        if len(self._ratios) < 8:
            return _FIRST_MARGIN
        ratio = percentile(sorted(self._ratios), 0.99) * _BEYOND
        return min(max(ratio, 1.0), _MOST_MARGIN)

    def span_within(
        self, seconds: float, start: int, limit: int, *, shared: bool = False
    ) -> int:
        """Return the most tokens, up to ``limit``, of a span that takes ``seconds``."""
        limit = min(limit, max(_FIRST_SPAN, GROWTH * self._longest_tokens[shared]))
        lengths = range(1, limit + 1)
        return bisect_right(
            lengths, seconds, key=lambda n: self.cost.of_span(start, n, shared=shared)
        )

    def _refresh(self) -> None:
        once_s, row_s, depth_s, shared_token_s, shared_depth_s = self._decode.coefficients
        span_s, token_s, span_depth_s = self._span.coefficients
        speed = self._speed
        self.cost = StepCost(
            decode_s=speed * once_s,
            decode_row_s=speed * row_s,
            decode_depth_s=speed * depth_s,
            span_s=speed * span_s,
            span_token_s=speed * token_s,
            span_depth_s=speed * span_depth_s,
            shared_token_s=speed * shared_token_s,
            shared_depth_s=speed * shared_depth_s,
        )


class _NonNegativeFit:
    """Weighted least squares ``seconds ~ coefficients . features``, coefficients >= 0.

    Keeps the normal equations, fading. They are solved by a few rounds of coordinate
    descent from the last solution: what the measurements do not tell apart stays as it
    was, where an inverted covariance would blow up.
    """

    def __init__(self, start: Sequence[float], typical: Sequence[float]) -> None:
        self.coefficients = list(start)
        self.observed = 0
        self._outliers_in_a_row = 0
        scale = sum(c * x for c, x in zip(start, typical, strict=True))
        size = range(len(start))
        prior = [_PRIOR_WEIGHT * (x / scale) ** 2 for x in typical]
        self._matrix = [[prior[i] if i == j else 0.0 for j in size] for i in size]
        self._vector = [prior[i] * start[i] for i in size]

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Add one measurement."""
        expected = sum(c * x for c, x in zip(self.coefficients, features, strict=True))
        seconds = max(seconds, 1e-9)
        keep = FORGETTING
        if self.observed >= _TRUSTED_AFTER:
            usual = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
            self._outliers_in_a_row = 0 if usual == seconds else self._outliers_in_a_row + 1
            if self._outliers_in_a_row < _CHANGED_AFTER:
                seconds = max(usual, 1e-9)
            else:
                keep = 1e-3
        self.observed += 1
        x = [value / seconds for value in features]
        size = range(len(x))
        for i in size:
            self._vector[i] = keep * self._vector[i] + x[i]
            for j in size:
                self._matrix[i][j] = keep * self._matrix[i][j] + x[i] * x[j]
        for _ in range(8):
            for i in size:
                row = self._matrix[i]
                rest = sum(row[j] * self.coefficients[j] for j in size if j != i)
                self.coefficients[i] = max(0.0, (self._vector[i] - rest) / row[i])


def _pairs(start: int, tokens: int) -> float:
    return tokens * (start + tokens / 2)
