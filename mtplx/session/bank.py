"""The SessionBank: which state is kept, lent and given up.

It lends state to requests that it finds by token ids (``match.py``), takes what they
computed, and stays within its budgets (``held.py``). The state itself is opaque
(``state.py``).

A request either *borrows* the buffer that holds its prefix and goes on writing to it,
or copies the prefix into a buffer of its own because another request runs in the first
one (``lease.py``). What it computes is kept while it runs, as views of its buffer:
nothing is held twice. What goes when the budget is full is ``eviction.py``'s to choose.

The invariants are those of ``held.py`` and its neighbours; ``check()`` verifies them.

The thread that runs the model owns the bank: the engine thread in a server. Only the
integer counters may be read from elsewhere.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from mtplx.errors import KVBudgetError
from mtplx.session.held import Held
from mtplx.session.lease import Lease, borrow
from mtplx.session.match import Lookup, Match
from mtplx.session.state import Buffer, Rows, Snapshot, TokenIds, TokenRun
from mtplx.session.tree import Node, as_run
from mtplx.session.view import view
from mtplx.types import BankView, StateKey

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
        pinned: Leases that requests hold.
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
        self.model = model
        self.pinned = 0
        self.too_large = 0
        self.misses: Counter[str] = Counter()
        self._held = Held(max_kv_size, max_bytes)

    @property
    def max_kv_size(self) -> int:
        return self._held.max_kv_size

    @property
    def max_bytes(self) -> int | None:
        return self._held.max_bytes

    @property
    def tokens(self) -> int:
        """Tokens that are held."""
        return self._held.tokens

    @property
    def nbytes(self) -> int:
        """Bytes that are held, those of running requests included."""
        return self._held.nbytes

    @property
    def running_nbytes(self) -> int:
        """Bytes of requests that run."""
        return self._held.ledger.running_nbytes

    @property
    def entries(self) -> int:
        """Nodes that are held."""
        return self._held.entries

    @property
    def evictions(self) -> int:
        """Nodes removed to make room, so far."""
        return self._held.evictions

    @property
    def thinned(self) -> int:
        """Snapshots removed to make room, so far."""
        return self._held.thinned

    # -- finding ----------------------------------------------------------------

    def look_up(self, key: StateKey, token_ids: TokenIds) -> Lookup:
        """Return what says at any time how much of ``token_ids`` can be restored.

        There is no other way to ask: admission, planner, metrics and dry runs read its
        match, and what is lent is exactly that much.
        """
        return Lookup(self, self._held, key, as_run(token_ids))

    def match(self, key: StateKey, token_ids: TokenIds) -> Match:
        """Say how much of ``token_ids`` can be restored, and why no more.

        Changes nothing.
        """
        return self.look_up(key, token_ids).match

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
        return self.look_up(key, token_ids).acquire(reserve_bytes)

    def lend(self, lookup: Lookup, reserve_bytes: int) -> Lease:
        """See ``acquire``."""
        self._held.ledger.refresh()
        match, path = lookup.found()
        used = [node for node in path if node.start < match.length]
        self._held.touch(used)
        try:
            borrowed = borrow(self._held, used, match.length, reserve_bytes)
        except KVBudgetError:
            # With its prefix it does not fit; without, what holds the prefix may go.
            self._held.need(reserve_bytes)
            match, used, borrowed = replace(match, length=0), [], None
        self._held.count_use(used, match.length)
        if match.miss_reason is not None:
            self.misses[match.miss_reason] += 1
        if used:
            # A pin on the deepest node holds the whole path: only leaves are evicted.
            self._held.pin(used[-1])
            self.pinned += 1
        return Lease(self, match, used, borrowed)

    def pin(self, key: StateKey, token_ids: TokenIds) -> int:
        """Never evict the state of ``token_ids``; return how much of it is held."""
        path, shared = self._held.trees.walk(key, as_run(token_ids))
        if shared:
            self._held.pin(self._ending_at(key, path, shared))
        return shared

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
        self._held.ledger.refresh()
        path, shared = self._held.trees.walk(key, tokens)
        parent = self._ending_at(key, path, shared)
        added = 0
        # The path must survive the eviction that makes room for its own end.
        with self._held.pinned(parent):
            if whole:
                self._held.ledger.move_in(path, rows)
            if shared < len(tokens) and (node := self._append(key, parent, tokens, rows)):
                path.append(node)
                added = len(node.tokens)
            if path:
                with self._held.pinned(path[-1]):
                    self._add_snapshots(key, path, tokens, snapshots)
        return added

    def _ending_at(self, key: StateKey, path: list[Node], depth: int) -> Node:
        """Return the node that ends at ``depth``, where a walk has ended.

        Its last run is cut there if need be, and then the upper half ends ``path``.
        """
        if not path:
            return self._held.trees.root(key)
        if path[-1].end > depth:
            path[-1] = self._held.split(path[-1], depth)
        return path[-1]

    def _append(
        self,
        key: StateKey,
        parent: Node,
        tokens: TokenRun,
        rows: Callable[[int, int], Rows],
    ) -> Node | None:
        held, start = self._held, parent.end
        held.make_room(len(tokens) - start, 0)
        end = min(len(tokens), start + max(held.max_kv_size - held.tokens, 0))
        if end <= start:
            return None
        piece = rows(start, end)
        # The buffer of a running request counts already.
        nbytes = 0 if held.ledger.is_running(piece.buffer) else piece.buffer.nbytes
        if not held.make_room(end - start, nbytes):
            self._too_large(
                key, tokens, start, f"{nbytes} bytes, max_bytes {self.max_bytes}"
            )
            return None
        return held.append(parent, tokens[start:end], piece)

    def _add_snapshots(
        self,
        key: StateKey,
        path: list[Node],
        tokens: TokenRun,
        snapshots: Mapping[int, Snapshot],
    ) -> None:
        for index, snapshot in sorted(snapshots.items()):
            at = bisect_left(path, index, key=lambda node: node.end)
            if at == len(path) or index in path[at].snapshots:
                continue
            if self._held.make_room(0, snapshot.nbytes):
                self._held.add_snapshot(path[at], index, snapshot)
            else:
                numbers = f"a snapshot of {snapshot.nbytes} bytes, max_bytes"
                self._too_large(
                    key, tokens[:index], path[at].start, f"{numbers} {self.max_bytes}"
                )

    def _too_large(self, key: StateKey, tokens: TokenRun, start: int, numbers: str) -> None:
        self._held.forget(key, tokens, start, "too_large")
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
        self._held.ledger.run(buffer, reserved_bytes)

    def unpin(self, node: Node) -> None:
        """See ``Lease.release``."""
        self._held.unpin(node)
        self.pinned -= 1

    def give_back(self, buffer: Buffer, *, intact: bool, keep_buffer: bool) -> None:
        """See ``Lease.release``."""
        ledger = self._held.ledger
        ledger.refresh()
        if not intact:
            for node in ledger.nodes(buffer):
                if node.parent is not None:
                    self._held.drop(node)
        elif keep_buffer:
            ledger.move_out(ledger.nodes(buffer))
        ledger.rest(buffer)
        ledger.save_waste(buffer)

    def reserve(self, buffer: Buffer, nbytes: int) -> bool:
        """See ``Lease.reserve``."""
        ledger = self._held.ledger
        ledger.refresh()
        if not self._held.make_room(0, nbytes - ledger.counted(buffer)):
            return False
        ledger.run(buffer, nbytes)
        return True

    # -- for the owner ----------------------------------------------------------

    def limit(self, max_bytes: int) -> None:
        """Set the budget in bytes, and give up what is beyond it."""
        self._held.ledger.refresh()
        self._held.limit(max_bytes)

    def clear(self) -> None:
        """Forget everything that is not pinned or in use."""
        self._held.clear()

    def read(
        self, key: StateKey, token_ids: TokenIds, start: int, end: int
    ) -> list[Rows] | None:
        """Return views of rows ``[start, end)`` of a prompt, in order; None where the
        bank has not all of them. Good until anything else is done with the bank."""
        path, shared = self._held.trees.walk(key, as_run(token_ids[:end]))
        if shared < end:
            return None
        return [
            node.view.slice(max(start - node.start, 0), min(end, node.end) - node.start)
            for node in path
            if node.end > start and node.start < end
        ]

    def snapshots(self, key: StateKey, token_ids: TokenIds) -> dict[int, Snapshot]:
        """Return the snapshots held of a prompt, by index."""
        path, shared = self._held.trees.walk(key, as_run(token_ids))
        return {
            index: kept.snapshot
            for node in path
            for index, kept in node.snapshots.items()
            if index <= shared
        }

    def view(self) -> BankView:
        """Return what is held, or the part of it that most is to be seen of."""
        return view(self._held.trees.roots(), self.entries)

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            AssertionError: One of them does not hold.
        """
        self._held.check()

    def _nodes(self) -> Iterator[Node]:
        return iter(self._held.trees)
