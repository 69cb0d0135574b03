"""The SessionBank: which state is kept, lent and given up.

It finds state by token ids (``tree.py``), lends it to requests, takes what they
computed, and stays within its budgets (``ledger.py`` weighs). The state itself is
opaque (``state.py``).

A request either *borrows* the buffer that holds its prefix and goes on writing to it,
or copies the prefix into a buffer of its own because another request runs in the first
one. What it computes is kept while it runs, as views of its buffer: nothing is held
twice. What goes when the budget is full is ``eviction.py``'s to choose.

Invariants, beside those of the tree, which ``check()`` verifies:

1. ``tokens`` and ``nbytes`` are the sums over all that is held, and stay within
   ``max_kv_size`` and ``max_bytes``.
2. What a lease pins, what leads there, and what lies in the buffer of a running request
   is never evicted.

The thread that runs the model owns the bank: the engine thread in a server. Only the
integer counters may be read from elsewhere.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtplx.errors import KVBudgetError
from mtplx.session.eviction import evictable, least_saving, least_worth
from mtplx.session.forgotten import Forgotten
from mtplx.session.lease import Lease
from mtplx.session.ledger import Ledger
from mtplx.session.match import Match, find_divergence
from mtplx.session.state import Buffer, Rows, Snapshot, TokenIds, TokenRun
from mtplx.session.tree import Kept, Node, PrefixTree, as_run
from mtplx.types import StateKey

logger = logging.getLogger(__name__)


class SessionBank:
    """Keeps KV state in memory and finds it again by token ids.

    Args:
        max_kv_size: Most tokens to hold; 0 keeps nothing.
        max_bytes: Most bytes to hold, those of running requests included; None leaves
            the limit to ``max_kv_size``.
        model: The model that ``restore_or_prefill_prompt_state`` uses when it is
            given none.

    Attributes:
        tokens, nbytes, entries: What is held; ``running_nbytes`` of it by requests.
        pinned: Leases that requests hold.
        evictions: Nodes removed to make room, so far; ``thinned``: snapshots.
        too_large: Times that state was not kept because it did not fit.
        misses: How often each reason occurred.
    """

    def __init__(
        self,
        max_kv_size: int = 256_000,
        *,
        max_bytes: int | None = None,
        model: Any = None,
    ) -> None:
        if max_kv_size < 0 or (max_bytes is not None and max_bytes < 0):
            raise ValueError("max_kv_size and max_bytes must not be negative.")
        self.max_kv_size = max_kv_size
        self.max_bytes = max_bytes
        self.model = model
        self.tokens = 0
        self.nbytes = 0
        self.running_nbytes = 0
        self.entries = 0
        self.pinned = 0
        self.evictions = 0
        self.thinned = 0
        self.too_large = 0
        self.misses: Counter[str] = Counter()
        self._trees: dict[StateKey, PrefixTree] = {}
        self._ledger = Ledger()
        self._forgotten = Forgotten()
        self._snapshot_bytes = 0
        self._clock = 0

    # -- finding ----------------------------------------------------------------

    def match(self, key: StateKey, token_ids: TokenIds) -> Match:
        """Say how much of ``token_ids`` can be restored, and why no more.

        Changes nothing. Every caller that wants to know (admission, planner, metrics,
        dry runs) asks here or through ``acquire``, which restores exactly this much.
        """
        return self._match(key, as_run(token_ids))[0]

    def acquire(
        self, key: StateKey, token_ids: TokenIds, *, reserve_bytes: int = 0
    ) -> Lease:
        """Lend the longest restorable prefix, and mark it used.

        Args:
            key: Of the model that will go on from it.
            token_ids: The prompt.
            reserve_bytes: What the request may grow to; room is made for it.

        Raises:
            KVBudgetError: Other requests hold what would be needed.
        """
        tokens = as_run(token_ids)
        match, path = self._match(key, tokens)
        used = [node for node in path if node.start < match.length]
        self._clock += 1
        for node in used:
            node.last_used = self._clock
        try:
            borrowed = self._borrow(key, used, match.length, reserve_bytes)
        except KVBudgetError:
            # With its prefix it does not fit; without, what holds the prefix may go.
            self._need([], reserve_bytes)
            match, used, borrowed = replace(match, length=0), [], None
        for node in used:
            node.uses += 1
        if used and match.length in used[-1].snapshots:
            used[-1].snapshots[match.length].uses += 1
        if match.miss_reason is not None:
            self.misses[match.miss_reason] += 1
        return Lease(self, match, used, borrowed)

    def pin(self, key: StateKey, token_ids: TokenIds) -> int:
        """Never evict the state of ``token_ids``; return how much of it is held."""
        tokens = as_run(token_ids)
        path, shared = self._walk(key, tokens)
        if shared:
            self._ending_at(key, path, shared).pins += 1
        return shared

    def _match(self, key: StateKey, tokens: TokenRun) -> tuple[Match, list[Node]]:
        path, shared = self._walk(key, tokens)
        usable = min(shared, max(len(tokens) - 1, 0))
        if key.any_prefix:
            length = usable
        else:
            indices = (index for node in path for index in node.snapshots)
            length = max((index for index in indices if index <= usable), default=0)
        held, divergence = find_divergence(path, tokens, shared)
        ahead = held if divergence else 0
        reason, reached = self._reason(key, tokens, length, usable, ahead)
        lost = max(min(reached, len(tokens) - 1) - length, 0) if reason else 0
        return Match(length, shared, reason, lost, divergence), path

    def _reason(
        self, key: StateKey, tokens: TokenRun, length: int, usable: int, ahead: int
    ) -> tuple[str | None, int]:
        """Return why no more can be restored, and how far it could have been.

        ``ahead`` is how far the bank goes on where the prompt leaves it.
        """
        if self.max_kv_size == 0 or self.max_bytes == 0:
            return "disabled", 0
        lost, why = self._forgotten.longest(key, tokens)
        if lost > usable:
            return why, lost
        if length < usable:
            return "no_snapshot", usable
        if ahead > usable:
            return "diverged", ahead
        if usable or len(tokens) < 2:
            return None, 0
        mine = key in self._trees and self._trees[key].root.children
        others = any(
            tree.root.children
            for other, tree in self._trees.items()
            if other != key and other.namespace == key.namespace
        )
        return ("other_model" if others and not mine else "never_seen"), 0

    def _walk(self, key: StateKey, tokens: TokenRun) -> tuple[list[Node], int]:
        tree = self._trees.get(key)
        return ([], 0) if tree is None else tree.walk(tokens)

    def _borrow(
        self, key: StateKey, used: list[Node], length: int, nbytes: int
    ) -> Buffer | None:
        """Make room for a request of ``nbytes``, and find the buffer it can go on in.

        That is one that holds the whole prefix and that nobody runs in. What else is
        held of it lies behind the prefix and moves out, unless that would be more than
        copying the prefix. Where there is no room for both it is given up.

        Args:
            key: Of the request.
            used: The nodes it restores; the last one is cut where the prefix ends.
            length: Of the prefix.
            nbytes: What the request may grow to.

        Returns:
            None where it needs a buffer of its own.

        Raises:
            KVBudgetError: Other requests hold what would be needed.
        """
        if used and used[-1].end > length:
            # What is not restored is neither pinned nor used. The lower half stays the
            # object that its pins and leases know.
            used[-1] = self._split(key, used[-1], length)
        buffer = used[-1].view.buffer if used else None
        if (
            buffer is None
            or not used[-1].in_whole_buffer
            or self._ledger.is_running(buffer)
            or _rows_behind(self._ledger.nodes(buffer), length) > length
        ):
            self._need(used, nbytes)
            return None
        behind = [node for node in self._ledger.nodes(buffer) if node.start >= length]
        moved_bytes = sum(node.view.nbytes for node in behind)
        grown_bytes = max(nbytes - buffer.nbytes, 0)
        # It counts as running from here on, so that no room is made at its cost.
        self._ledger.run(buffer, 0)
        try:
            if not self._has_room(used, grown_bytes + moved_bytes):
                if any(n.pins or {*n.children.values()} - {*behind} for n in behind):
                    self._need(used, grown_bytes + moved_bytes)
                while behind:
                    self._evict(behind.pop())
                self._need(used, grown_bytes)
        except KVBudgetError:
            self._ledger.rest(buffer)
            raise
        self._ledger.move_out(behind)
        return buffer

    def _need(self, used: list[Node], nbytes: int) -> None:
        if not self._has_room(used, nbytes):
            raise KVBudgetError(
                f"{nbytes} more bytes of KV cache are needed; of {self.max_bytes} "
                f"(--kv-bytes) running requests hold {self.running_nbytes}."
            )

    def _has_room(self, used: list[Node], nbytes: int) -> bool:
        """Make room for a request, but not at the cost of what it is about to use."""
        if used:
            used[-1].pins += 1
        try:
            return self._make_room(0, nbytes)
        finally:
            if used:
                used[-1].pins -= 1

    # -- storing ----------------------------------------------------------------

    def store(
        self,
        key: StateKey,
        token_ids: TokenIds,
        rows: Callable[[int, int], Rows],
        snapshots: Mapping[int, Snapshot],
        *,
        whole: bool = False,
        more_follows: bool = False,
    ) -> int:
        """Keep the state of ``token_ids``; only what the bank lacks is taken.

        Args:
            key: Of the model that computed the state.
            token_ids: The tokens whose state is complete.
            rows: Called with ``(start, end)`` for the rows of those tokens, which
                nobody may change.
            snapshots: State of the layers that cannot be cut, by index in
                ``(0, len(token_ids)]``.
            whole: ``rows`` can give any part of ``token_ids``, from the buffer of a
                running request: copies of it that the bank holds are let go.
            more_follows: Rows behind the last snapshot are kept too, since a later call
                brings a snapshot behind them.

        Returns:
            Tokens that are newly held. State that does not fit whole is cut to the
            longest prefix that does.
        """
        tokens = as_run(token_ids)
        if not key.any_prefix and not more_follows:
            # Rows behind the last snapshot could never be resumed.
            tokens = tokens[: max(snapshots, default=0)]
        if len(tokens) > self.max_kv_size > 0:
            self._too_large(
                key,
                tokens,
                self.max_kv_size,
                f"{len(tokens)} tokens, max_kv_size {self.max_kv_size}",
            )
        tokens = tokens[: self.max_kv_size]
        if len(tokens) == 0 or self.max_bytes == 0:
            return 0
        path, shared = self._walk(key, tokens)
        parent = self._ending_at(key, path, shared)
        added = 0
        # The path must survive the eviction that makes room for its own end.
        parent.pins += 1
        try:
            if whole:
                self._ledger.move_in(self._walk(key, tokens[:shared])[0], rows)
            if shared < len(tokens):
                added = self._append(key, parent, tokens, rows)
            self._add_snapshots(key, tokens[: shared + added], snapshots)
        finally:
            parent.pins -= 1
        self._recount()
        return added

    def _ending_at(self, key: StateKey, path: list[Node], depth: int) -> Node:
        """Return the node that ends at ``depth``, splitting a run if need be."""
        if not path:
            return self._trees.setdefault(key, PrefixTree()).root
        node = path[-1]
        return node if node.end == depth else self._split(key, node, depth)

    def _split(self, key: StateKey, node: Node, at: int) -> Node:
        self._ledger.detach(node)
        upper = self._trees[key].split(node, at)
        self._ledger.attach(upper)
        self._ledger.attach(node)
        self.entries += 1
        return upper

    def _append(
        self,
        key: StateKey,
        parent: Node,
        tokens: TokenRun,
        rows: Callable[[int, int], Rows],
    ) -> int:
        start = parent.end
        self._make_room(len(tokens) - start, 0)
        end = min(len(tokens), start + max(self.max_kv_size - self.tokens, 0))
        if end <= start:
            return 0
        piece = rows(start, end)
        # The buffer of a running request counts already.
        nbytes = 0 if self._ledger.is_running(piece.buffer) else piece.buffer.nbytes
        if not self._make_room(end - start, nbytes):
            self._too_large(
                key, tokens, start, f"{nbytes} bytes, max_bytes {self.max_bytes}"
            )
            return 0
        continues = parent.uses > 0 and not parent.children
        node = self._trees[key].append(parent, tokens[start:end], piece)
        # The next part of a conversation that was resumed is no one-off.
        node.uses = parent.uses if continues else 0
        self._clock += 1
        node.last_used = self._clock
        self._ledger.attach(node)
        self.tokens += end - start
        self.entries += 1
        return end - start

    def _add_snapshots(
        self, key: StateKey, tokens: TokenRun, snapshots: Mapping[int, Snapshot]
    ) -> None:
        path, depth = self._walk(key, tokens)
        if path:
            path[-1].pins += 1
        try:
            for index, snapshot in sorted(snapshots.items()):
                node = next((n for n in path if n.start < index <= min(n.end, depth)), None)
                if node is None or index in node.snapshots:
                    continue
                if self._make_room(0, snapshot.nbytes):
                    node.snapshots[index] = Kept(snapshot)
                    self._snapshot_bytes += snapshot.nbytes
                    self._recount()
                else:
                    numbers = f"a snapshot of {snapshot.nbytes} bytes, max_bytes"
                    self._too_large(
                        key, tokens[:index], node.start, f"{numbers} {self.max_bytes}"
                    )
        finally:
            if path:
                path[-1].pins -= 1

    def _too_large(self, key: StateKey, tokens: TokenRun, start: int, numbers: str) -> None:
        self._forgotten.add(key, tokens, start, "too_large")
        if self.too_large == 0:
            logger.warning(
                "State too large for the SessionBank is kept only in part (%s). "
                "Raise the limit to reuse all of it.",
                numbers,
            )
        self.too_large += 1

    # -- for a lease ------------------------------------------------------------

    def run_in(self, buffer: Buffer, reserved_bytes: int) -> None:
        """See ``Lease.run_in``."""
        self._ledger.run(buffer, reserved_bytes)
        self._recount()

    def give_back(self, buffer: Buffer, *, intact: bool, keep_buffer: bool) -> None:
        """See ``Lease.release``."""
        if not intact:
            for node in self._ledger.nodes(buffer):
                if node.parent is not None:
                    self._drop(node)
        elif keep_buffer:
            self._ledger.move_out(self._ledger.nodes(buffer))
        self._ledger.rest(buffer)
        self._ledger.save_waste(buffer)
        self._recount()

    def reserve(self, buffer: Buffer, nbytes: int) -> bool:
        """See ``Lease.reserve``."""
        if not self._make_room(0, nbytes - self._ledger.counted(buffer)):
            return False
        self._ledger.run(buffer, nbytes)
        self._recount()
        return True

    # -- room -------------------------------------------------------------------

    def _make_room(self, tokens: int, nbytes: int) -> bool:
        """Give up what is worth least until that much more fits."""
        while not self._fits(tokens, nbytes):
            if self.max_bytes is not None and self.running_nbytes + nbytes > self.max_bytes:
                return False  # Whatever is given up, what runs leaves too little.
            if not self._fits(0, nbytes) and self._thin():
                continue
            if victim := least_worth(self._nodes(), self._ledger):
                self._evict(victim)
            elif not self._ledger.squeeze():
                return False
        return True

    def _fits(self, tokens: int, nbytes: int) -> bool:
        self._recount()
        bytes_fit = self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes
        return bytes_fit and self.tokens + tokens <= self.max_kv_size

    def _evict(self, node: Node) -> None:
        buffer = node.view.buffer
        key = next(key for key, tree in self._trees.items() if tree.root is _root(node))
        self._forgotten.add(key, node.prefix(), node.start, "evicted")
        self._drop(node)
        self.evictions += 1
        self._ledger.save_waste(buffer, 0)

    def _drop(self, node: Node) -> None:
        """Take a node and all below it out of the tree."""
        PrefixTree.remove(node)
        gone = [node]
        while gone:
            below = gone.pop()
            gone.extend(below.children.values())
            self._ledger.detach(below)
            self._snapshot_bytes -= sum(k.snapshot.nbytes for k in below.snapshots.values())
            self.tokens -= len(below.tokens)
            self.entries -= 1
            below.parent = None

    def _thin(self) -> bool:
        """Drop the snapshot that saves least; False where all are worth keeping."""
        found = least_saving(self._trees.values())
        if found is None:
            return False
        node, index = found
        self._snapshot_bytes -= node.snapshots.pop(index).snapshot.nbytes
        self.thinned += 1
        return True

    def limit(self, max_bytes: int) -> None:
        """Set the budget in bytes, and give up what is beyond it."""
        self.max_bytes = max_bytes
        self._make_room(0, 0)

    def clear(self) -> None:
        """Forget everything that is not pinned or in use."""
        while leaves := [
            node for node in evictable(self._nodes(), self._ledger) if not node.children
        ]:
            for leaf in leaves:
                self._drop(leaf)
        self._recount()

    # -- looking ----------------------------------------------------------------

    def read(
        self, key: StateKey, token_ids: TokenIds, start: int, end: int
    ) -> list[Rows] | None:
        """Return views of rows ``[start, end)`` of a prompt, in order; None where the
        bank has not all of them. Good until anything else is done with the bank."""
        path, shared = self._walk(key, as_run(token_ids[:end]))
        if shared < end:
            return None
        return [
            node.view.slice(max(start - node.start, 0), min(end, node.end) - node.start)
            for node in path
            if node.end > start and node.start < end
        ]

    def snapshots(self, key: StateKey, token_ids: TokenIds) -> dict[int, Snapshot]:
        """Return the snapshots held of a prompt, by index."""
        path, shared = self._walk(key, as_run(token_ids))
        return {
            index: kept.snapshot
            for node in path
            for index, kept in node.snapshots.items()
            if index <= shared
        }

    @property
    def trees(self) -> Mapping[StateKey, PrefixTree]:
        """What is held, to look at. Good until anything else is done with the bank."""
        return self._trees

    def _nodes(self) -> Iterator[Node]:
        for tree in self._trees.values():
            yield from tree

    def _recount(self) -> None:
        self._ledger.refresh()
        self.nbytes = self._ledger.nbytes + self._snapshot_bytes
        self.running_nbytes = self._ledger.running_nbytes

    def check(self) -> None:
        """Verify the invariants in the head of this file.

        Raises:
            AssertionError: One of them does not hold.
        """
        for tree in self._trees.values():
            tree.check()
        nodes = list(self._nodes())
        self._ledger.check(nodes)
        self._recount()
        snapshots = sum(k.snapshot.nbytes for n in nodes for k in n.snapshots.values())
        assert self._snapshot_bytes == snapshots
        assert sum(len(node.tokens) for node in nodes) == self.tokens
        assert len(nodes) == self.entries
        assert self.tokens <= self.max_kv_size
        if self.max_bytes is not None:
            assert self.nbytes <= max(self.max_bytes, self.running_nbytes)


def _rows_behind(nodes: list[Node], length: int) -> int:
    """Return how many of their rows lie behind index ``length`` of their sequence."""
    return sum(max(node.end - max(node.start, length), 0) for node in nodes)


def _root(node: Node) -> Node:
    while node.parent is not None:
        node = node.parent
    return node
