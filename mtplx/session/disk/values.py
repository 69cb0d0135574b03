"""The values that the disk tier takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mtplx.types import HostState


@dataclass(frozen=True)
class Piece:
    """State of a prompt that is not on disk.

    Attributes:
        start, end: Tokens whose rows are missing; equal where the rows are there and
            only a snapshot is missing.
        snapshots: Indices of the snapshots to store with them: in ``(start, end]``,
            or ``(start,)`` where the rows are there.
    """

    start: int
    end: int
    snapshots: tuple[int, ...] = ()


@dataclass(frozen=True)
class FetchedPiece:
    """A run of rows read from disk.

    A run is stored whole and two prompts may part inside it, so its rows may go on
    after ``until``: with tokens that the prompt does not have.

    Attributes:
        start, end: Tokens whose rows these are.
        until: Index at which the next piece takes over, or the match ends; rows from
            there on are not the prompt's.
        rows: Of ``[start, end)``. The arrays cannot be written to.
        snapshots: State at indices in ``(start, until]``.
    """

    start: int
    end: int
    until: int
    rows: HostState
    snapshots: Mapping[int, HostState]


@dataclass(frozen=True)
class Fetched:
    """What a fetch read.

    Attributes:
        start: Tokens that the caller had already.
        length: Tokens that can be restored with the pieces; ``start`` where none can.
        pieces: In order. The first begins at ``start`` or before, each next one where
            the one before says ``until``, and the last one says ``length``.
        seconds: Time it took to read and verify.
        nbytes: Bytes read, also of files that turned out bad.
    """

    start: int
    length: int
    pieces: tuple[FetchedPiece, ...] = ()
    seconds: float = 0.0
    nbytes: int = 0
