"""What the scheduler knows of one request, and where its prompt may be cut.

A record belongs to the ``Scheduler`` that made it, and so to the engine thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mtplx.scheduler.step import Stall


class State(StrEnum):
    """Where a request stands. One that has ended is an ``Ended`` and no longer here."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"


@dataclass(eq=False)
class Request:
    """One request in the scheduler.

    Attributes:
        number: Order of arrival.
        num_computed_tokens: Prompt tokens whose state exists; while the request waits,
            those expected to be restored.
        uncached_tokens: Prompt tokens not restored, as known when it arrived or started.
        served_at_arrival: Prompt tokens the scheduler had computed when it arrived.
        served_to_it: Prompt tokens computed for it.
        edges: Indices where a span must end, ascending.
        atomic_ranges: Disjoint half-open ranges that no span may split, ascending.
        alone: Its spans never share the forward of a decode.
    """

    request_id: str
    number: int
    prompt_tokens: int
    num_computed_tokens: int
    served_at_arrival: int
    deadline_s: float | None = None
    edges: tuple[int, ...] = ()
    atomic_ranges: tuple[tuple[int, int], ...] = ()
    alone: bool = False
    state: State = State.WAITING
    decoded_tokens: int = 0
    served_to_it: int = 0
    suffered_s: float = 0.0
    caused_s: float = 0.0

    def __post_init__(self) -> None:
        self.uncached_tokens = self.remaining_tokens

    @property
    def remaining_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return self.prompt_tokens - self.num_computed_tokens

    @property
    def depth_tokens(self) -> int:
        """Tokens in the cache of this request."""
        return self.num_computed_tokens + self.decoded_tokens

    @property
    def stall(self) -> Stall:
        """What it suffered and caused so far."""
        return Stall(self.suffered_s, self.caused_s)

    def expect_cached(self, cached_tokens: int) -> None:
        """Set how much of the prompt is, or will be, restored."""
        assert 0 <= cached_tokens < self.prompt_tokens, "the last prompt token is computed"
        self.num_computed_tokens = cached_tokens
        self.uncached_tokens = self.remaining_tokens

    def set_cuts(
        self, edges: Sequence[int], atomic_ranges: Sequence[tuple[int, int]]
    ) -> None:
        """Set where spans must end and where they must not."""
        self.edges = tuple(sorted({e for e in edges if 0 < e < self.prompt_tokens}))
        self.atomic_ranges = tuple(sorted(atomic_ranges))
        previous_end = 0
        for start, end in self.atomic_ranges:
            assert previous_end <= start < end <= self.prompt_tokens, "ranges overlap"
            assert bisect_right(self.edges, start) == bisect_right(self.edges, end - 1), (
                "a mandatory edge lies inside an atomic range"
            )
            previous_end = end

    def next_end(self, start: int, limit: int, length: int) -> int:
        """Return where the span that begins at ``start`` ends.

        Args:
            start: Where it begins.
            limit: Most tokens it may have. Only an atomic range that begins (or goes on)
                at ``start`` and is longer makes it end later, at the end of that range.
            length: Tokens it has when the next place to stop is beyond the limit.
        """
        i = bisect_right(self.edges, start)
        stop = self.edges[i] if i < len(self.edges) else self.prompt_tokens
        end = stop if stop <= start + limit else start + length
        i = bisect_right(self.atomic_ranges, end, key=lambda r: r[0]) - 1
        if i >= 0:
            first, last = self.atomic_ranges[i]
            if first < end < last:
                return first if first > start else last
        return end
