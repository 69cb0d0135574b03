"""How a prompt is split into spans. Pure: no MLX, no clock.

Law 1: spans are contiguous, ordered and disjoint, cover the rest of the prompt, are
never longer than the window, and end at every mandatory edge. ``prefill.py`` runs
what is planned here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import NamedTuple

from mtplx.types import Prompt

DEFAULT_WINDOW = 2048
DEFAULT_TAIL_GRID = 32


class Span(NamedTuple):
    """The half-open range ``[start, end)`` of the prompt that one step computes."""

    start: int
    end: int
    is_tail: bool


def _iter_prefill_chunk_spans(
    total_len: int,
    mandatory_edges: Iterable[int] = (),
    *,
    window: int = DEFAULT_WINDOW,
    start: int = 0,
) -> Iterator[Span]:
    """Yield the spans ``(start, end, is_tail)`` of a prompt; the last one is the tail.

    Args:
        total_len: Length of the prompt in tokens.
        mandatory_edges: Indices where a span must end, in any order. Those outside
            ``(start, total_len)`` are no cut and are left out.
        window: Longest span in tokens, at least 1.
        start: Tokens whose state is already there.

    Raises:
        ValueError: ``window`` is below 1, or not ``0 <= start <= total_len``.
    """
    if window < 1:
        raise ValueError(f"The window must be at least 1 token, not {window}.")
    if not 0 <= start <= total_len:
        raise ValueError(f"start {start} lies outside the prompt of {total_len} tokens.")
    cuts = _inner_edges(total_len, mandatory_edges, start)
    for begin, end in pairwise((start, *cuts, total_len)):
        for position in range(begin, end, window):
            stop = min(position + window, end)
            yield Span(position, stop, stop == total_len)


def _prefill_spans_with_tail_grid(
    total_len: int,
    mandatory_edges: Iterable[int] = (),
    *,
    window: int = DEFAULT_WINDOW,
    tail_grid: int = DEFAULT_TAIL_GRID,
    start: int = 0,
) -> Iterator[Span]:
    """Yield spans whose tail is at most ``tail_grid`` tokens long.

    A longer tail is cut at the last multiple of ``tail_grid`` before the end of the
    prompt. The part before that cut ends where the next turn can resume even when
    its prompt differs in the last few tokens; and only the short tail pays for the
    output layer, which for thousands of tokens would need gigabytes.

    Args:
        total_len: Length of the prompt in tokens.
        mandatory_edges: As for ``_iter_prefill_chunk_spans``.
        window: Longest span in tokens, at least 1.
        tail_grid: Grid in tokens, at least 1.
        start: Tokens whose state is already there.

    Raises:
        ValueError: As ``_iter_prefill_chunk_spans``, or ``tail_grid`` is below 1.
    """
    if tail_grid < 1:
        raise ValueError(f"The tail grid must be at least 1 token, not {tail_grid}.")
    edges = _inner_edges(total_len, mandatory_edges, start)
    last_edge = edges[-1] if edges else start
    if total_len - last_edge > tail_grid:
        edges = (*edges, (total_len - 1) // tail_grid * tail_grid)
    yield from _iter_prefill_chunk_spans(total_len, edges, window=window, start=start)


def _inner_edges(total_len: int, edges: Iterable[int], start: int) -> tuple[int, ...]:
    return tuple(sorted({edge for edge in edges if start < edge < total_len}))


@dataclass(frozen=True)
class PrefillPlan:
    """What will be done with one prompt, decided before its first forward.

    Attributes:
        prompt_tokens: Length of the prompt.
        restored_tokens: Length of the prefix that comes from the bank.
        edges: Mandatory edges, ascending: where a span must end.
        snapshots: Where the state of layers that cannot be cut is kept: every edge and
            the end of the prompt. Empty for models that have no such layers.
        window: Longest span in tokens.
        tail_grid: Grid on which the tail is cut.
    """

    prompt_tokens: int
    restored_tokens: int
    edges: tuple[int, ...]
    snapshots: frozenset[int]
    window: int
    tail_grid: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of a prompt that is read without regard to anyone else."""
        return tuple(self.spans_until(self.prompt_tokens, self.restored_tokens))

    def resumable(self, index: int) -> int:
        """Return how much of the first ``index`` tokens another prompt could restore,
        once this plan is carried out."""
        if not self.snapshots:
            return index
        return max((at for at in self.snapshots if at <= index), default=0)

    def spans_until(self, end: int, start: int) -> Iterator[Span]:
        """Yield what computes ``[start, end)``, the tail refined if it ends the prompt.

        A scheduler that chooses ranges of its own gets them computed this way.
        """
        if end == self.prompt_tokens:
            yield from _prefill_spans_with_tail_grid(
                end, self.edges, window=self.window, tail_grid=self.tail_grid, start=start
            )
        else:
            edges = (*self.edges, end)
            spans = _iter_prefill_chunk_spans(
                self.prompt_tokens, edges, window=self.window, start=start
            )
            yield from takewhile(lambda span: span.end <= end, spans)


def plan_prefill(
    prompt: Prompt,
    *,
    restored_tokens: int = 0,
    any_prefix: bool,
    window: int = DEFAULT_WINDOW,
    tail_grid: int = DEFAULT_TAIL_GRID,
    parts_at: int | None = None,
) -> PrefillPlan:
    """Plan the spans of a prompt and where its state is kept.

    Every edge costs a forward of its own, so only a model that cannot cut its state
    later (``any_prefix`` False) gets the prompt's edges as mandatory ones, and the cut
    of its tail.

    Args:
        prompt: With its edges and stable prefix.
        restored_tokens: Length of the prefix that comes from the bank.
        any_prefix: As in ``StateKey``.
        window: Longest span in tokens.
        tail_grid: Grid on which the tail is cut.
        parts_at: Where the prompt parts from one that came before it; a third may part
            there too. None where it does not.
    """
    total = len(prompt.token_ids)
    if any_prefix:
        return PrefillPlan(total, restored_tokens, (), frozenset(), window, tail_grid)
    wanted = (*prompt.edges, prompt.stable_prefix_len, parts_at or 0)
    spans = _prefill_spans_with_tail_grid(
        total, wanted, window=total, tail_grid=tail_grid, start=restored_tokens
    )
    ends = tuple(span.end for span in spans)
    return PrefillPlan(
        total, restored_tokens, ends[:-1], frozenset(ends), window, tail_grid
    )
