"""What a benchmark asks of a server, wherever that is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Sample:
    """What one prompt cost; what a server does not tell is None.

    Attributes:
        prompt_tokens, cached_tokens: Of the prompt, and of them restored.
        ttft_s: From sending it to its first token.
        compute_tok_s: Computed tokens over the time in the model alone.
        cache_source: Where the restored tokens were.
        peak_bytes: Most memory that MLX held meanwhile, weights included.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    ttft_s: float
    compute_tok_s: float | None = None
    cache_source: str | None = None
    peak_bytes: int | None = None


@dataclass
class Streams:
    """Streams that run beside a prompt.

    Attributes:
        times_s: For each stream when its tokens came, by ``time.perf_counter``.
    """

    times_s: list[list[float]] = field(default_factory=list)

    def worst_gap_s(self, begin_s: float, end_s: float) -> float | None:
        """Return the longest gap between two tokens of a stream that touches the time from
        ``begin_s`` to ``end_s``; None where none does."""
        gaps = [
            after - before
            for times in self.times_s
            for before, after in itertools.pairwise(list(times))
            if after > begin_s and before < end_s
        ]
        return max(gaps, default=None)


class Target(Protocol):
    """A server that is measured."""

    name: str

    def facts(self) -> dict[str, Any]:
        """Say what it is: where, and which model it serves."""

    def check(self, prompt_tokens: int, modes: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` where it cannot measure that."""

    def read(self, depth_tokens: int, new_tokens: int, *, known: str, new: str) -> Sample:
        """Send a prompt and wait for its first token.

        Args:
            depth_tokens: Length of its first part.
            new_tokens: Length of the rest.
            known, new: Name the contents of both parts: equal names, equal tokens.
        """

    def streams(self, count: int, seed: str) -> AbstractContextManager[Streams]:
        """Run streams until the block ends; each has begun when it begins."""

    def restart(self) -> None:
        """Forget what is in memory and keep what is on disk."""
