"""State of the SessionBank on loan to one request."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        # A pin on the deepest node holds the whole path: only leaves are evicted.
        self._node = used[-1] if used else None
        kept = self._node.snapshots.get(match.length) if self._node else None
        self.snapshot = None if kept is None else kept.snapshot
        self._bank = bank
        self._buffer = borrowed
        if self._node is not None:
            self._node.pins += 1
            bank.pinned += 1

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
            self._node.pins -= 1
            self._bank.pinned -= 1
            self._node = None
        self.rows, self.snapshot, self.borrowed = (), None, None
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._bank.give_back(buffer, intact=intact, keep_buffer=keep_buffer)


def _head(node: Node, end: int) -> Rows:
    """Return the rows of ``node`` up to index ``end`` of the prompt."""
    if end >= node.end:
        return node.view
    return node.view.slice(0, end - node.start)
