"""The prefix index: a radix tree over token ids.

Each node is a run of tokens, ``[start, end)`` of every prompt that passes through it,
with a view of the KV rows of exactly those tokens, so that conversations that begin
alike hold their common part once. Layers that cannot be cut keep snapshots at single
indices inside the runs. The tree knows where things are, not what they are worth:
budgets and eviction are the bank's.

Invariants, which ``check()`` verifies:

1. The runs of a node's children begin with different tokens, and no run is empty.
2. A node has as many rows as tokens; snapshot indices lie in ``(start, end]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mtplx.session.state import Rows, Snapshot, TokenIds, TokenRun


@dataclass
class Kept:
    """A snapshot in the tree, and how often it was restored."""

    snapshot: Snapshot
    uses: int = 0


class Node:
    """One run of tokens.

    Attributes:
        uses: How often a request restored it.
        last_used: Tick of the bank's clock.
        pins: Leases that end here.
    """

    __slots__ = (
        "children",
        "last_used",
        "parent",
        "pins",
        "rows",
        "snapshots",
        "start",
        "tokens",
        "uses",
    )

    def __init__(
        self, tokens: TokenRun, start: int, rows: Rows | None, parent: Node | None
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.rows = rows
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.snapshots: dict[int, Kept] = {}
        self.uses = 0
        self.last_used = 0
        self.pins = 0

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.tokens)

    @property
    def view(self) -> Rows:
        """Its rows; only a root has none."""
        assert self.rows is not None
        return self.rows

    @property
    def in_whole_buffer(self) -> bool:
        """Its buffer holds the whole sequence up to here, not only this run."""
        return self.view.start == self.start

    def prefix(self) -> TokenRun:
        """Return all tokens from the root to the end of this run."""
        runs = []
        node: Node | None = self
        while node is not None:
            runs.append(node.tokens)
            node = node.parent
        return np.concatenate(runs[::-1])


class PrefixTree:
    """The runs of one ``StateKey``."""

    def __init__(self) -> None:
        self.root = Node(as_run(()), 0, None, None)

    def __iter__(self) -> Iterator[Node]:
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def walk(self, tokens: TokenRun) -> tuple[list[Node], int]:
        """Follow ``tokens`` down: the nodes entered, and how far they agree."""
        path: list[Node] = []
        node, depth = self.root, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            path.append(child)
            common = common_length(child.tokens, tokens[depth:])
            depth += common
            if common < len(child.tokens):
                break
            node = child
        return path, depth

    def split(self, node: Node, at: int) -> Node:
        """Cut ``node`` at index ``at``; return the new upper half.

        The lower half stays the same object, so that leases on it stay good.
        """
        assert node.parent is not None
        cut = at - node.start
        upper = Node(node.tokens[:cut], node.start, node.view.slice(0, cut), node.parent)
        upper.last_used, upper.uses = node.last_used, node.uses
        upper.snapshots = {i: s for i, s in node.snapshots.items() if i <= at}
        node.parent.children[int(upper.tokens[0])] = upper
        node.snapshots = {i: s for i, s in node.snapshots.items() if i > at}
        node.rows = node.view.slice(cut, len(node.tokens))
        node.tokens = node.tokens[cut:]
        node.start = at
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        return upper

    def append(self, parent: Node, tokens: TokenRun, rows: Rows) -> Node:
        """Add a run after ``parent``."""
        assert len(rows) == len(tokens) > 0
        node = Node(tokens.copy(), parent.end, rows, parent)
        parent.children[int(tokens[0])] = node
        return node

    @staticmethod
    def remove(node: Node) -> None:
        """Take a node out, with all that hangs on it."""
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            AssertionError: One of them does not hold.
        """
        for node in self:
            assert node.parent is not None
            assert len(node.tokens) > 0
            assert node.start == node.parent.end
            assert node.parent.children[int(node.tokens[0])] is node
            assert len(node.view) == len(node.tokens)
            assert all(node.start < index <= node.end for index in node.snapshots)
            assert node.pins >= 0


def as_run(token_ids: TokenIds) -> TokenRun:
    """Return token ids as the tree holds them."""
    return np.asarray(token_ids, dtype=np.int32)


def common_length(a: TokenRun, b: TokenRun) -> int:
    """Return for how many tokens two runs agree from their beginning."""
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n
