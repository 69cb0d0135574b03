"""What the SessionBank gives up first. It chooses, ``held.py`` acts.

Snapshots that save little go before any state that only they make reachable does; then
the least recently used leaves, as long as there are such, of what no second request
ever asked for; then the others.

The order is kept up to date with every change of a node or snapshot, so that a choice
costs the same however much is held.

Invariants, which ``check()`` verifies:

1. ``_one_offs`` and ``_others`` together have the leaves that nothing holds, by
   ``last_used``. No two leaves have the same: one tick uses a way down a tree, which has
   one leaf, or appends one.
2. ``_one_off_tokens`` counts what no second request ever asked for and nothing holds.
3. ``_thinnable`` has the snapshots that may be thinned out, by what they save.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from mtplx.session.tree import Kept, Node

ONE_OFF_SHARE = 0.2
"""Entries that were used once go before the others, as long as they are more than this
share of the tokens: else a bank full of old favourites would have no room for a new
conversation."""

THIN_TOKENS = 256
"""A snapshot may be thinned out when no more than this many tokens would have to be
computed to reach it from the one before."""

T = TypeVar("T")


class Ranking(Generic[T]):
    """Items in the order of their ranks, of which no two are the same.

    A sorted list: to move its pointers takes a microsecond for each few thousand.
    """

    def __init__(self) -> None:
        self._ranks: list[Any] = []
        self._items: dict[Any, T] = {}

    def __contains__(self, rank: Any) -> bool:
        return rank in self._items

    @property
    def first(self) -> T | None:
        """The item of the lowest rank."""
        return self._items[self._ranks[0]] if self._ranks else None

    def add(self, rank: Any, item: T) -> None:
        assert rank not in self._items
        insort(self._ranks, rank)
        self._items[rank] = item

    def remove(self, rank: Any) -> None:
        del self._items[rank]
        del self._ranks[bisect_left(self._ranks, rank)]

    def check(self, items: dict[Any, T]) -> None:
        """Verify that it has ``items``, by rank.

        Raises:
            AssertionError: It has others.
        """
        assert self._items == items
        assert self._ranks == sorted(items)


class Order:
    """The order in which things go."""

    def __init__(self) -> None:
        self._one_offs: Ranking[Node] = Ranking()
        self._others: Ranking[Node] = Ranking()
        self._thinnable: Ranking[Kept] = Ranking()
        self._one_off_tokens = 0

    def least_worth(self, tokens: int) -> Node | None:
        """Return the leaf to evict, of ``tokens`` that are held; None where none may be."""
        one_off, other = self._one_offs.first, self._others.first
        if one_off is None or other is None:
            return one_off or other
        if self._one_off_tokens > ONE_OFF_SHARE * tokens:
            return one_off
        return min(one_off, other, key=lambda node: node.last_used)

    def least_saving(self) -> Kept | None:
        """Return the snapshot that saves the fewest tokens for its bytes, of several the
        one that came first; None where all are worth keeping."""
        return self._thinnable.first

    def update(self, node: Node) -> None:
        """Put a node that changed where it belongs now; its snapshots stay."""
        idle = _idle(node)
        one_off = idle and node.uses == 0
        one_off_tokens = len(node.tokens) if one_off else 0
        self._one_off_tokens += one_off_tokens - node.one_off_tokens
        node.one_off_tokens = one_off_tokens
        if node.rank:
            (self._one_offs if node.rank in self._one_offs else self._others).remove(
                node.rank
            )
        node.rank = node.last_used if idle and not node.children else 0
        if node.rank:
            (self._one_offs if one_off else self._others).add(node.rank, node)

    def update_snapshots(self, kepts: Iterable[Kept | None]) -> None:
        """Put snapshots that changed, or whose node did, where they belong now."""
        for kept in kepts:
            if kept is None:
                continue
            rank = _rank(kept) if _thinnable(kept) else None
            if rank == kept.rank:
                continue
            if kept.rank is not None:
                self._thinnable.remove(kept.rank)
            if rank is not None:
                self._thinnable.add(rank, kept)
            kept.rank = rank

    def check(self, nodes: list[Node]) -> None:
        """Verify the invariants.

        Raises:
            AssertionError: One of them does not hold.
        """
        idle = [node for node in nodes if _idle(node)]
        one_offs = [node for node in idle if node.uses == 0]
        leaves = {node.last_used: node for node in idle if not node.children}
        self._one_offs.check({r: n for r, n in leaves.items() if n.uses == 0})
        self._others.check({r: n for r, n in leaves.items() if n.uses > 0})
        assert self._one_off_tokens == sum(len(node.tokens) for node in one_offs)
        kepts = [kept for node in nodes for kept in node.snapshots.values()]
        assert all(k.gap == k.index - n.snapshot_before(k.index) for n, k in _at(kepts))
        self._thinnable.check({_rank(kept): kept for kept in kepts if _thinnable(kept)})


def _idle(node: Node) -> bool:
    """Nothing holds it: no pin, no request that runs in its buffer."""
    return node.parent is not None and not node.pins and not node.running


def _thinnable(kept: Kept) -> bool:
    """Never the last one before the end of a run of prompts, nor where prompts part, nor
    one that was ever used."""
    node = kept.node
    if node is None or node.pins or kept.uses or kept.gap > THIN_TOKENS:
        return False
    return kept.index != node.end or len(node.children) == 1


def _rank(kept: Kept) -> tuple[float, int]:
    return kept.gap / max(kept.nbytes, 1), kept.number


def _at(kepts: list[Kept]) -> Iterable[tuple[Node, Kept]]:
    return ((kept.node, kept) for kept in kepts if kept.node is not None)
