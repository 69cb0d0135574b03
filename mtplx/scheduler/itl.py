"""Collects the gaps between tokens and says whether the target was kept.

One recorder for the server, one for each request; memory is bounded. A recorder belongs
to the thread that sends the tokens, which measures the gaps; the summary is a value.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from mtplx.types import ITL_BOUNDS_S, ItlSummary


class ItlRecorder:
    """Keeps the last ``recent`` gaps and counts all."""

    def __init__(self, recent: int = 1024) -> None:
        self._recent: deque[float] = deque(maxlen=recent)
        self._gaps = 0
        self._misses = 0
        self._worst_s: float | None = None
        self._target_s: float | None = None
        self._total_s = 0.0
        self._counts = [0] * (len(ITL_BOUNDS_S) + 1)

    def record(self, gap_s: float, target_s: float | None) -> None:
        """Record one gap, and the target that was in force."""
        self._recent.append(gap_s)
        self._gaps += 1
        self._total_s += gap_s
        self._counts[bisect_left(ITL_BOUNDS_S, gap_s)] += 1
        self._target_s = target_s
        self._worst_s = gap_s if self._worst_s is None else max(self._worst_s, gap_s)
        if target_s is not None and gap_s > target_s:
            self._misses += 1

    def summary(self) -> ItlSummary:
        """Return what was recorded so far."""
        ordered = sorted(self._recent)
        return ItlSummary(
            gaps=self._gaps,
            target_s=self._target_s,
            p50_s=percentile(ordered, 0.50) if ordered else None,
            p99_s=percentile(ordered, 0.99) if ordered else None,
            worst_s=self._worst_s,
            misses=self._misses,
            total_s=self._total_s,
            within=tuple(accumulate(self._counts[:-1])),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
