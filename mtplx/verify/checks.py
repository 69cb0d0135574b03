"""What one check of the self-test found, as a value.

A check passes where the logits are those of one pass, give or take rounding, and the
same tokens come out of them. Pure: no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["same", "near tie", "different", "failed", "not possible"]
"""``near tie``: a token differs where the reference itself hardly prefers one; passes.
``failed``: it raised, or did not exercise what it is there for. ``not possible``: this
model, or how it was loaded, has no such way; passes, and says so."""


@dataclass(frozen=True)
class Flip:
    """A step at which another token was the most likely one.

    Attributes:
        position: Index of the token that was read last.
        expected_token, token: The reference's choice, and this one.
        margin: How far the reference's best logit lies above that of ``token``.
    """

    position: int
    expected_token: int
    token: int
    margin: float


@dataclass(frozen=True)
class Check:
    """One way to a prompt's state, compared with one pass.

    Attributes:
        name: Of the way.
        verdict: What came of it.
        reach: What was exercised, counted, by name.
        compared_steps: Rows of logits that were compared.
        max_difference: Largest difference of a logit (of a log-probability through the
            engine); None where nothing, or no number, was compared.
        relative_error: The same as a share of the largest logit, over the worst step.
        flips: Where the most likely token was another one.
        note: Why it failed, or is not possible.
        seconds: Time it took.
    """

    name: str
    verdict: Verdict
    reach: Mapping[str, int | str] = field(default_factory=dict)
    compared_steps: int = 0
    max_difference: float | None = None
    relative_error: float | None = None
    flips: tuple[Flip, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing is wrong, as far as it could be found out."""
        return self.verdict not in ("different", "failed")


class NotPossibleError(Exception):
    """This model has no such way; the message says why."""


class NotReachedError(Exception):
    """A check did not exercise what it is there for; the message says what."""


def require(reached: bool, message: str) -> None:
    """Raise ``NotReachedError`` unless it was reached."""
    if not reached:
        raise NotReachedError(message)
