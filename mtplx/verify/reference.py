"""What everything is compared with: the logits of one pass, and the count of differences.

The reference is a single forward over prompt and answer into a fresh cache. Every way is
then fed these very tokens, so that a step after a flip can still be compared; where
nothing flips, they are the ones it would have generated itself. Runs on the thread that
owns MLX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtplx.models.trial import is_same, relative_error
from mtplx.types import TokenLogprob
from mtplx.verify.checks import Check, Flip, NotReachedError, Verdict


@dataclass(frozen=True)
class Reference:
    """A prompt, its greedy answer, and the logits of one pass.

    Attributes:
        prompt: Token ids.
        answer: Token ids, at least one.
        logits: ``[n, vocab]`` float32: the last one read the last token but one.
        dtype: Of the model.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logits: mx.array
    dtype: str

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt + self.answer

    def after(self, position: int) -> mx.array:
        """Return the logits ``[vocab]`` after the token at ``position``."""
        return self.logits[position - (len(self.tokens) - 1 - len(self.logits))]


class Tally:
    """Collects how far logits are from the reference's."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._differences: list[float] = []
        self._errors: list[float] = []
        self._flips: list[Flip] = []

    def add(self, position: int, logits: mx.array | None) -> None:
        """Compare the logits ``[vocab]`` after the token at ``position``."""
        if logits is None:
            raise NotReachedError(f"There are no logits after token {position}.")
        expected = self._reference.after(position)
        difference = mx.abs(logits.astype(mx.float32) - expected).max()
        self._differences.append(float(difference))
        self._errors.append(relative_error(logits, expected))
        self._choice(position, int(mx.argmax(logits)))

    def add_chosen(self, position: int, chosen: TokenLogprob) -> None:
        """Compare a token that was generated, by the log-probabilities told with it."""
        expected = self._reference.after(position)
        found = dict([(chosen.token_id, chosen.logprob), *chosen.top])
        logprobs = expected - mx.logsumexp(expected)
        mine = logprobs[mx.array(list(found))]
        difference = float(mx.abs(mx.array(list(found.values())) - mine).max())
        self._differences.append(difference)
        self._errors.append(difference / float(mx.abs(expected).max()))
        self._choice(position, chosen.token_id)

    def _choice(self, position: int, token: int) -> None:
        expected = self._reference.after(position)
        best = int(mx.argmax(expected))
        if token != best:
            margin = float(expected[best] - expected[token])
            self._flips.append(Flip(position, best, token, margin))

    def check(self, name: str, reach: Mapping[str, int | str], seconds: float) -> Check:
        """Return what came of it."""
        difference, error = _worst(self._differences), _worst(self._errors)
        verdict: Verdict = "same"
        note = ""
        if not self._errors:
            verdict, note = "failed", "Nothing was compared."
        elif math.isnan(error):
            verdict, note = "different", "Logits are not numbers."
        elif not is_same(error, self._reference.dtype):
            verdict, note = "different", "The logits are off by more than rounding."
        elif any(flip.margin > difference for flip in self._flips):
            verdict, note = "different", "Another token, and not for a near tie."
        elif self._flips:
            verdict = "near tie"
        numbers = bool(self._errors) and not math.isnan(error)
        return Check(
            name,
            verdict,
            reach,
            len(self._errors),
            difference if numbers else None,
            error if numbers else None,
            tuple(self._flips),
            note,
            seconds,
        )


def _worst(values: Sequence[float]) -> float:
    """Return the largest, or NaN where one is."""
    return max(values, key=lambda value: (math.isnan(value), value), default=math.nan)
