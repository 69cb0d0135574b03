"""The prefix index: a radix tree over token ids for each ``StateKey``.

Each node is a run of tokens, ``[start, end)`` of every prompt that passes through it,
with a view of the KV rows of exactly those tokens, so that conversations that begin
alike hold their common part once. Layers that cannot be cut keep snapshots at single
indices inside the runs. The trees know where things are, not what they are worth:
budgets and eviction are the bank's.

Invariants, which ``check()`` verifies:

1. The runs of a node's children begin with different tokens, and no run is empty.
2. A node has as many rows as tokens; snapshot indices lie in ``(start, end]``.
3. Children stand in the order of their last use, so that the latest is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from mtplx.session.state import Rows, Snapshot, TokenIds, TokenRun
from mtplx.types import StateKey


class Kept:
    """A snapshot in the tree.

    Attributes:
        node, index: Where it is; None once it is taken out.
        nbytes: Of the snapshot, weighed once.
        number: Higher than that of any that came before.
        uses: How often it was restored.
        gap: Tokens from the snapshot before, on the way from the root, to this one.
        rank: Its place in the order of ``eviction.py``; None outside of that.
    """

    __slots__ = ("gap", "index", "nbytes", "node", "number", "rank", "snapshot", "uses")

    def __init__(self, snapshot: Snapshot, node: Node, index: int, number: int) -> None:
        self.snapshot = snapshot
        self.node: Node | None = node
        self.index = index
        self.nbytes = snapshot.nbytes
        self.number = number
        self.uses = 0
        self.gap = 0
        self.rank: tuple[float, int] | None = None


class Node:
    """One run of tokens.

    Attributes:
        rows: A view of their state; None for a root, and for what is held no more.
        parent: None for a root, and for what is held no more.
        uses: How often a request restored it.
        last_used: Tick of the bank's clock.
        pins: Leases that end here.
        running: A request writes to the buffer of its rows; ``ledger.py`` says so.
        rank, one_off_tokens: Its place in the order of ``eviction.py``; 0 outside of it.
        name: Of its prefix, for ``forgotten.py``; None where nobody asked yet.
    """

    __slots__ = (
        "children",
        "last_used",
        "name",
        "one_off_tokens",
        "parent",
        "pins",
        "rank",
        "rows",
        "running",
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
        self.running = False
        self.rank = 0
        self.one_off_tokens = 0
        self.name: int | None = None

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

    @property
    def latest(self) -> Node | None:
        """The child that was used last."""
        return next(reversed(self.children.values()), None)

    def prefix(self) -> TokenRun:
        """Return all tokens from the root to the end of this run."""
        return self.tokens_from(0)

    def tokens_from(self, start: int) -> TokenRun:
        """Return the tokens from ``start``, at or before this run, to its end."""
        node, runs = self, [self.tokens]
        while node.start > start:
            assert node.parent is not None
            node = node.parent
            runs.append(node.tokens)
        return np.concatenate(runs[::-1])[start - node.start :]

    def use(self, tick: int) -> None:
        """Note that it is the last one used now."""
        self.last_used = tick
        if self.parent is not None and self.parent.latest is not self:
            siblings, first = self.parent.children, int(self.tokens[0])
            siblings[first] = siblings.pop(first)

    def append(self, tokens: TokenRun, rows: Rows, tick: int) -> Node:
        """Add a run after this one, used now."""
        assert len(rows) == len(tokens) > 0
        node = Node(tokens.copy(), self.end, rows, self)
        node.last_used = tick
        self.children[int(tokens[0])] = node
        return node

    def split(self, at: int) -> Node:
        """Cut this run at index ``at``; return the new upper half.

        The lower half stays the same object, so that leases on it stay good.
        """
        assert self.parent is not None
        cut = at - self.start
        upper = Node(self.tokens[:cut], self.start, self.view.slice(0, cut), self.parent)
        upper.last_used, upper.uses = self.last_used, self.uses
        for index in [index for index in self.snapshots if index <= at]:
            kept = upper.snapshots[index] = self.snapshots.pop(index)
            kept.node = upper
        self.parent.children[int(upper.tokens[0])] = upper
        self.rows = self.view.slice(cut, len(self.tokens))
        self.tokens = self.tokens[cut:]
        self.start = at
        self.parent = upper
        upper.children[int(self.tokens[0])] = self
        return upper

    def remove(self) -> list[Node]:
        """Take it out, with all that hangs on it; return all of that."""
        assert self.parent is not None
        del self.parent.children[int(self.tokens[0])]
        gone = [self]
        for node in gone:
            gone.extend(node.children.values())
            node.parent = None
        return gone

    def snapshots_after(self, index: int) -> Iterator[Kept]:
        """Find the first snapshot behind ``index`` on each way on from there."""
        stack = [self]
        while stack:
            node = stack.pop()
            behind = [i for i in node.snapshots if i > index]
            if behind:
                yield node.snapshots[min(behind)]
            else:
                stack.extend(node.children.values())

    def snapshot_before(self, index: int) -> int:
        """Return the index of the last snapshot before ``index``; 0 without one."""
        node: Node | None = self
        while node is not None:
            if before := [i for i in node.snapshots if i < index]:
                return max(before)
            node = node.parent
        return 0


class PrefixTrees:
    """The runs of all keys."""

    def __init__(self) -> None:
        # By namespace first: whoever asks for one never looks at the others.
        self._roots: dict[str, dict[StateKey, Node]] = {}

    def __iter__(self) -> Iterator[Node]:
        stack = [root for roots in self._roots.values() for root in roots.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def root(self, key: StateKey) -> Node:
        """Return the node that holds no tokens and leads to all of a key's."""
        roots = self._roots.setdefault(key.namespace, {})
        if key not in roots:
            roots[key] = Node(as_run(()), 0, None, None)
            roots[key].name = hash(key)
        return roots[key]

    def roots(self) -> Iterator[tuple[StateKey, Node]]:
        """Return the root of each key."""
        for roots in self._roots.values():
            yield from roots.items()

    def walk(self, key: StateKey, tokens: TokenRun) -> tuple[list[Node], int]:
        """Follow ``tokens`` down: the nodes entered, and how far they agree."""
        path: list[Node] = []
        node, depth = self._roots.get(key.namespace, {}).get(key), 0
        while node is not None and depth < len(tokens):
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

    def only_others(self, key: StateKey) -> bool:
        """Say whether there is state of other models in the namespace, and none of this."""
        roots = self._roots.get(key.namespace, {})
        held = {other for other, root in roots.items() if root.children}
        return bool(held) and key not in held

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
            assert all(k.node is node and k.index == i for i, k in node.snapshots.items())
            assert node.pins >= 0
            children = node.parent.children.values()
            assert all(a.last_used < b.last_used for a, b in pairwise(children))


def as_run(token_ids: TokenIds) -> TokenRun:
    """Return token ids as the tree holds them."""
    return np.asarray(token_ids, dtype=np.int32)


def common_length(a: TokenRun, b: TokenRun) -> int:
    """Return for how many tokens two runs agree from their beginning."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    different = a[:n] != b[:n]
    first = int(different.argmax())
    return first if different[first] else n
