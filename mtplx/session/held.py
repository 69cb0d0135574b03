"""What the SessionBank holds, within its budgets.

The trees (``tree.py``), the buffers behind them (``ledger.py``), the order in which
things go (``eviction.py``) and the sums change together, and only here. Each change
costs what it touches, never what is held in all: a bank of ten thousand entries is as
quick as one of a hundred.

Invariants, which ``check()`` verifies:

1. ``tokens``, ``entries`` and ``nbytes`` are the sums over all that is held; the first
   stays within ``max_kv_size`` and the last within ``max_bytes``.
2. What a lease pins, what leads there, and what lies in the buffer of a running request
   is never evicted.
3. ``clock`` ticks with every change of what a prompt would find.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtplx.errors import KVBudgetError
from mtplx.session.eviction import Order
from mtplx.session.forgotten import Forgotten
from mtplx.session.ledger import Ledger
from mtplx.session.state import Rows, Snapshot, TokenRun
from mtplx.session.tree import Kept, Node, PrefixTrees
from mtplx.types import StateKey


class Held:
    """Nodes and snapshots, what they weigh, and which of them goes.

    Args:
        max_kv_size: Most tokens to hold.
        max_bytes: Most bytes to hold, those of running requests included; None leaves
            the limit to ``max_kv_size``.

    Attributes:
        tokens, entries: What is held.
        evictions: Nodes removed to make room, so far; ``thinned``: snapshots.
        clock: Ticks with every change.
    """

    def __init__(self, max_kv_size: int, max_bytes: int | None) -> None:
        self.max_kv_size = max_kv_size
        self.max_bytes = max_bytes
        self.tokens = 0
        self.entries = 0
        self.evictions = 0
        self.thinned = 0
        self.clock = 0
        self.trees = PrefixTrees()
        self.order = Order()
        self.ledger = Ledger(self.order.update)
        self.forgotten = Forgotten()
        self._snapshot_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers and snapshots."""
        return self.ledger.nbytes + self._snapshot_bytes

    # -- changing ---------------------------------------------------------------

    def append(self, parent: Node, tokens: TokenRun, rows: Rows) -> Node:
        """Hold a run after ``parent``, used now."""
        continues = parent.uses > 0 and not parent.children
        node = parent.append(tokens, rows, self._tick())
        # The next part of a conversation that was resumed is no one-off.
        node.uses = parent.uses if continues else 0
        self.tokens += len(tokens)
        self.entries += 1
        self.ledger.attach(node)
        self.order.update(node)
        self._update_end(parent)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut a run in two; return the upper half."""
        upper = node.split(at)
        self._tick()
        self.entries += 1
        self.ledger.split(upper, node)
        self.order.update(upper)
        self.order.update(node)
        # Unlike the lower half it is not pinned.
        self.order.update_snapshots(upper.snapshots.values())
        return upper

    def drop(self, node: Node) -> None:
        """Hold a node, and all below it, no more."""
        parent = node.parent
        assert parent is not None
        self._tick()
        for gone in node.remove():
            self.order.update(gone)
            self.ledger.detach(gone)
            for index in [*gone.snapshots]:
                self._take_out(gone.snapshots.pop(index))
            self.tokens -= len(gone.tokens)
            self.entries -= 1
            # Whoever still knows the node does not keep its buffer alive.
            gone.rows = None
        self._update_end(parent)

    def add_snapshot(self, node: Node, index: int, snapshot: Snapshot) -> None:
        """Hold a snapshot at an index inside a node."""
        kept = Kept(snapshot, node, index, self._tick())
        kept.gap = index - node.snapshot_before(index)
        node.snapshots[index] = kept
        self._snapshot_bytes += kept.nbytes
        self.order.update_snapshots([kept])
        self._update_after(node, index, index)

    def touch(self, path: list[Node]) -> None:
        """Note that these nodes, a way from a root, are asked for now."""
        self._tick()
        for node in path:
            node.use(self.clock)
            self.order.update(node)

    def count_use(self, path: list[Node], length: int) -> None:
        """Note that these nodes were restored, up to a snapshot at ``length`` if there is
        one."""
        for node in path:
            node.uses += 1
            self.order.update(node)
        if path and (kept := path[-1].snapshots.get(length)):
            kept.uses += 1
            self.order.update_snapshots([kept])

    def pin(self, node: Node) -> None:
        """Let a node, and what leads there, stay until ``unpin``."""
        node.pins += 1
        if node.pins == 1:
            self._update_pinned(node)

    def unpin(self, node: Node) -> None:
        """Undo one ``pin``."""
        node.pins -= 1
        if node.pins == 0:
            self._update_pinned(node)

    @contextmanager
    def pinned(self, node: Node) -> Iterator[None]:
        """Pin a node for a while."""
        self.pin(node)
        try:
            yield
        finally:
            self.unpin(node)

    def forget(self, key: StateKey, tokens: TokenRun, start: int, reason: str) -> None:
        """Remember why the state of ``tokens[start:]`` is not held."""
        self._tick()
        self.forgotten.add(key, tokens, start, reason)

    def limit(self, max_bytes: int) -> None:
        """Set the budget in bytes, and give up what is beyond it."""
        self._tick()
        self.max_bytes = max_bytes
        self.make_room(0, 0)

    # -- room -------------------------------------------------------------------

    def make_room(self, tokens: int, nbytes: int) -> bool:
        """Give up what is worth least until that much more fits."""
        while not self._fits(tokens, nbytes):
            running_nbytes = self.ledger.running_nbytes
            if self.max_bytes is not None and running_nbytes + nbytes > self.max_bytes:
                return False  # Whatever is given up, what runs leaves too little.
            if not self._fits(0, nbytes) and self._thin():
                continue
            if victim := self.order.least_worth(self.tokens):
                self.evict(victim)
            elif not self.ledger.squeeze():
                return False
        return True

    def need(self, nbytes: int) -> None:
        """Make room.

        Raises:
            KVBudgetError: Requests that run leave too little.
        """
        if not self.make_room(0, nbytes):
            raise KVBudgetError(
                f"{nbytes} more bytes of KV cache are needed; of {self.max_bytes} "
                f"(--kv-bytes) running requests hold {self.ledger.running_nbytes}."
            )

    def evict(self, node: Node) -> None:
        """Drop a node, and remember that it had to go."""
        buffer = node.view.buffer
        self.forgotten.add_node(node, "evicted")
        self.drop(node)
        self.evictions += 1
        self.ledger.save_waste(buffer, 0)

    def clear(self) -> None:
        """Forget everything that is not pinned or in use."""
        while leaf := self.order.least_worth(self.tokens):
            self.drop(leaf)

    def _fits(self, tokens: int, nbytes: int) -> bool:
        bytes_fit = self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes
        return bytes_fit and self.tokens + tokens <= self.max_kv_size

    def _thin(self) -> bool:
        """Drop the snapshot that saves least; False where all are worth keeping."""
        kept = self.order.least_saving()
        if kept is None or kept.node is None:
            return False
        node, index = kept.node, kept.index
        self._tick()
        self._take_out(node.snapshots.pop(index))
        self._update_after(node, index, node.snapshot_before(index))
        self.thinned += 1
        return True

    # -- keeping it all in step ---------------------------------------------------

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _take_out(self, kept: Kept) -> None:
        kept.node = None
        self._snapshot_bytes -= kept.nbytes
        self.order.update_snapshots([kept])

    def _update_end(self, node: Node) -> None:
        """A node has got or lost a child: it may be a leaf now, or prompts part there."""
        self.order.update(node)
        self.order.update_snapshots([node.snapshots.get(node.end)])

    def _update_pinned(self, node: Node) -> None:
        self.order.update(node)
        self.order.update_snapshots(node.snapshots.values())

    def _update_after(self, node: Node, index: int, before: int) -> None:
        """The snapshot before those that follow ``index`` is at ``before`` now.

        There is one on each way on. They are few: where prompts part, the second one
        leaves a snapshot.
        """
        followers = [*node.snapshots_after(index)]
        for kept in followers:
            kept.gap = kept.index - before
        self.order.update_snapshots(followers)

    def check(self) -> None:
        """Verify the invariants, those of the neighbours included.

        Raises:
            AssertionError: One of them does not hold.
        """
        self.trees.check()
        nodes = list(self.trees)
        self.ledger.check(nodes)
        self.order.check(nodes)
        snapshots = sum(k.snapshot.nbytes for n in nodes for k in n.snapshots.values())
        assert self._snapshot_bytes == snapshots
        assert sum(len(node.tokens) for node in nodes) == self.tokens
        assert len(nodes) == self.entries
        assert self.tokens <= self.max_kv_size
        if self.max_bytes is not None:
            assert self.nbytes <= max(self.max_bytes, self.ledger.running_nbytes)
