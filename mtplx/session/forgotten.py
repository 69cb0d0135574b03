"""What the bank held once and why it does not any more.

A prompt is remembered by a name for every ``GRID`` tokens of it, a hash chained from its
beginning, so that a later miss can say that its state was evicted, or was too large to
keep, and how long it was. Nothing can be restored from here. Nodes remember the name of
their prefix: whoever goes on from one need not begin at the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from mtplx.session.state import TokenRun
from mtplx.session.tree import Node
from mtplx.types import StateKey

GRID = 32
_MOST_NAMES = 65_536


class Forgotten:
    """The most recent losses, by token prefix."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[int, str] = OrderedDict()

    def add(self, key: StateKey, tokens: TokenRun, start: int, reason: str) -> None:
        """Remember that the state of ``tokens[start:]`` is gone."""
        names = _names(hash(key), tokens, 0)
        self._add((name for length, name in names if length > start), reason)

    def add_node(self, node: Node, reason: str) -> None:
        """Remember that the state of a node is gone; it still has its parent."""
        self._add((name for _, name in _names_in(node)), reason)

    def longest(
        self, key: StateKey, tokens: TokenRun, known: Node | None
    ) -> tuple[int, str | None]:
        """Return the longest lost prefix of ``tokens``, in tokens, and why it is lost.

        ``known`` is a node that ``tokens`` begin with, if there is one: losses shorter
        than that are none.
        """
        found: tuple[int, str | None] = (0, None)
        if self._reasons:
            first = 0, hash(key)
            if known is not None:
                first = known.end // GRID * GRID, _name(known)
            for length, name in [first, *_names(first[1], tokens[first[0] :], first[0])]:
                if reason := self._reasons.get(name):
                    found = (length, reason)
        return found

    def _add(self, names: Iterable[int], reason: str) -> None:
        for name in names:
            self._reasons[name] = reason
            self._reasons.move_to_end(name)
        while len(self._reasons) > _MOST_NAMES:
            self._reasons.popitem(last=False)


def _names(name: int, tokens: TokenRun, start: int) -> Iterator[tuple[int, int]]:
    """Go on from ``name``, that of the prefix of ``start`` tokens: lengths and names.

    ``start`` is on the grid, and ``tokens`` are those behind it.
    """
    raw, step = tokens.tobytes(), GRID * tokens.itemsize
    for end in range(step, len(raw) + 1, step):
        name = hash((name, raw[end - step : end]))
        yield start + end // tokens.itemsize, name


def _names_in(node: Node) -> list[tuple[int, int]]:
    """Return the lengths on the grid inside a node, and the names of these prefixes."""
    assert node.parent is not None
    start = node.start // GRID * GRID
    if node.end < start + GRID:
        return []
    return [*_names(_name(node.parent), node.tokens_from(start), start)]


def _name(node: Node) -> int:
    """Return the name of the longest prefix on the grid that ends in or before a node."""
    unnamed = []
    while node.name is None:
        unnamed.append(node)
        assert node.parent is not None
        node = node.parent
    name = node.name
    for node in reversed(unnamed):
        names = _names_in(node)
        name = node.name = names[-1][1] if names else name
    return name
