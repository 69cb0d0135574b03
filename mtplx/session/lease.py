"""State of the SessionBank on loan to one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtplx.errors import KVBudgetError
from mtplx.session.held import Held
from mtplx.session.match import Match
from mtplx.session.state import Buffer, Rows
from mtplx.session.tree import Node

if TYPE_CHECKING:
    from mtplx.session.bank import SessionBank


class Lease:
    """State on loan to one request, until ``release()``.

    Attributes:
        match: What was found.
        borrowed: The buffer with the state of ``match.length`` tokens, to write to from
            there on; None where the rows must be copied.
        rows: Pieces to copy, whose lengths add up to ``match.length``, in order; empty
            with ``borrowed``. Good until anything else is done with the bank.
        snapshot: The snapshot at ``match.length``; None where none is needed.
    """

    def __init__(
        self,
        bank: SessionBank,
        match: Match,
        used: list[Node],
        borrowed: Buffer | None,
    ) -> None:
        self.match = match
        self.borrowed = borrowed
        self.rows: tuple[Rows, ...] = ()
        if borrowed is None:
            self.rows = tuple(_head(node, match.length) for node in used)
        # The bank has pinned it.
        self._node = used[-1] if used else None
        kept = self._node.snapshots.get(match.length) if self._node else None
        self.snapshot = None if kept is None else kept.snapshot
        self._bank = bank
        self._buffer = borrowed

    def run_in(self, buffer: Buffer, reserved_bytes: int = 0) -> None:
        """Say where the request runs: the borrowed buffer, or its own.

        Args:
            buffer: It writes to this one.
            reserved_bytes: What it may grow to, and counts as.
        """
        self.rows = ()
        self._buffer = buffer
        self._bank.run_in(buffer, reserved_bytes)

    def reserve(self, nbytes: int) -> bool:
        """Let the buffer grow to ``nbytes``; False when there is no room for that."""
        assert self._buffer is not None
        return self._bank.reserve(self._buffer, nbytes)

    def release(self, *, intact: bool = True, keep_buffer: bool = False) -> None:
        """End the loan; may be called twice.

        Args:
            intact: The buffer's rows are what they should be. If not, all that the bank
                holds of it is dropped.
            keep_buffer: The caller goes on using the buffer; the bank copies what it
                holds of it.
        """
        if self._node is not None:
            self._bank.unpin(self._node)
            self._node = None
        self.rows, self.snapshot, self.borrowed = (), None, None
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._bank.give_back(buffer, intact=intact, keep_buffer=keep_buffer)


def borrow(held: Held, used: list[Node], length: int, nbytes: int) -> Buffer | None:
    """Make room for a request of ``nbytes``, and find the buffer it can go on in.

    That is one that holds the whole prefix and that nobody runs in. What else is held of
    it lies behind the prefix and moves out, unless that would be more than copying the
    prefix. Where there is no room for both it is given up.

    Args:
        held: All that the bank has.
        used: The nodes that the request restores; the last one is cut where the prefix
            ends.
        length: Of the prefix.
        nbytes: What the request may grow to.

    Returns:
        None where it needs a buffer of its own.

    Raises:
        KVBudgetError: Other requests hold what would be needed.
    """
    if not used:
        held.need(nbytes)
        return None
    if used[-1].end > length:
        # What is not restored is neither pinned nor used. The lower half stays the
        # object that its pins and leases know.
        used[-1] = held.split(used[-1], length)
    # Room is made, but not at the cost of what the request is about to use.
    with held.pinned(used[-1]):
        nodes = held.ledger.nodes(used[-1].view.buffer)
        if not _may_run_on(used[-1], nodes):
            held.need(nbytes)
            return None
        return _run_on(held, used[-1], nodes, nbytes)


def _may_run_on(last: Node, nodes: list[Node]) -> bool:
    """Say whether a request may go on behind ``last`` in its buffer, that of ``nodes``."""
    if last.running or not last.in_whole_buffer:
        return False
    rows_behind = sum(max(node.end - max(node.start, last.end), 0) for node in nodes)
    return rows_behind <= last.end


def _run_on(held: Held, last: Node, nodes: list[Node], nbytes: int) -> Buffer:
    """Let a request go on behind ``last`` in its buffer, and make room there."""
    buffer = last.view.buffer
    behind = [node for node in nodes if node.start >= last.end]
    moved_bytes = sum(node.view.nbytes for node in behind)
    grown_bytes = max(nbytes - buffer.nbytes, 0)
    # It counts as running from here on, so that no room is made at its cost.
    held.ledger.run(buffer, 0)
    try:
        if not held.make_room(0, grown_bytes + moved_bytes):
            if _is_needed(behind):
                held.need(grown_bytes + moved_bytes)
            while behind:
                held.evict(behind.pop())
            held.need(grown_bytes)
    except KVBudgetError:
        held.ledger.rest(buffer)
        raise
    held.ledger.move_out(behind)
    return buffer


def _is_needed(nodes: list[Node]) -> bool:
    """Say whether one is pinned, or leads to others."""
    known = set(nodes)
    children = (child for node in nodes for child in node.children.values())
    return any(node.pins for node in nodes) or any(c not in known for c in children)


def _head(node: Node, end: int) -> Rows:
    """Return the rows of ``node`` up to index ``end`` of the prompt."""
    if end >= node.end:
        return node.view
    return node.view.slice(0, end - node.start)
