"""What is on disk, or on its way there: the one view that all threads share.

Every method may be called from any thread: each holds the one lock, none waits for the
disk. The engine thread asks and queues, the writer stores and evicts, the reader takes
out what is bad. ``forest.py`` knows where things are; this file knows who is busy with
them: files that are queued have a place in the forest and cannot be read yet, and what
is pinned is not evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from threading import Lock

from mtplx.session.disk.forest import Forest, Removed, Segment, Trail
from mtplx.session.disk.format import ROWS, Entry, root_id
from mtplx.session.disk.values import Piece
from mtplx.session.state import TokenRun
from mtplx.types import StateKey


class Catalog:
    """A forest under a lock. ``clock`` gives the Unix time."""

    def __init__(self, forest: Forest, clock: Callable[[], float]) -> None:
        self._forest = forest
        self._clock = clock
        self._touched: set[Segment] = set()
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all files on disk."""
        return self._forest.nbytes

    @property
    def files(self) -> int:
        """Files on disk."""
        return self._forest.files

    @property
    def segments(self) -> int:
        """Segments on disk."""
        return self._forest.segments

    # -- the engine thread --------------------------------------------------------

    def match(self, key: StateKey, tokens: TokenRun) -> int:
        """Return how many tokens the files alone restore, less than all of them."""
        with self._lock:
            return self._forest.match(key, tokens)[0]

    def missing(
        self,
        key: StateKey,
        tokens: TokenRun,
        snapshots: Collection[int],
        max_piece_tokens: int,
    ) -> list[Piece]:
        """Return what is neither on disk nor queued; what is there counts as alive."""
        if not key.any_prefix:
            # Rows behind the last snapshot could never be resumed.
            tokens = tokens[: max(snapshots, default=0)]
        wanted = sorted(snapshots)
        pieces: list[Piece] = []
        with self._lock:
            trail, depth = self._forest.walk(key, tokens, queued=True)
            for segment, until in trail:
                self._touch(segment)
                known = _known(segment)
                inside = (index for index in wanted if segment.start < index <= until)
                pieces += [Piece(i, i, (i,)) for i in inside if i not in known]
        for start in range(depth, len(tokens), max_piece_tokens):
            end = min(start + max_piece_tokens, len(tokens))
            pieces.append(Piece(start, end, tuple(i for i in wanted if start < i <= end)))
        return pieces

    def queue(
        self, key: StateKey, tokens: TokenRun, piece: Piece, snapshots: set[int]
    ) -> Segment | None:
        """Make a place for a piece, pinned; None where it does not fit the tree."""
        tokens = tokens[: piece.end]
        with self._lock:
            trail, depth = self._forest.walk(key, tokens, queued=True)
            if piece.start == piece.end:
                found = (s for s, until in trail if s.start < piece.end <= until)
                segment = next(found, None)
                if segment is None or snapshots & _known(segment):
                    return None
            elif depth != piece.start:
                return None
            else:
                parent = trail[-1][0] if trail else self._forest.root(root_id(key))
                segment = self._forest.add(parent, depth, tokens[depth:].copy())
                segment.queued.add(ROWS)
            segment.queued |= snapshots
            segment.last_used_s = self._clock()
            segment.pins += 1
            return segment

    def plan(self, key: StateKey, tokens: TokenRun, start: int) -> tuple[int, Trail]:
        """Return the match, and what to read for the part after ``start``, pinned."""
        with self._lock:
            length, trail = self._needed(key, tokens, start)
            if trail:
                # Only leaves are evicted, so this holds the whole trail.
                trail[-1][0].pins += 1
            return length, trail

    def nbytes_to_read(self, key: StateKey, tokens: TokenRun, start: int) -> int:
        """Return the bytes of the files that ``plan`` would name."""
        with self._lock:
            length, trail = self._needed(key, tokens, start)
            rows = sum(segment.entries[ROWS].nbytes for segment, _ in trail)
            if key.any_prefix or not trail:
                return rows
            return rows + trail[-1][0].entries[length].nbytes

    def _needed(self, key: StateKey, tokens: TokenRun, start: int) -> tuple[int, Trail]:
        length, trail = self._forest.match(key, tokens)
        return length, [
            (segment, min(until, length))
            for segment, until in trail
            if segment.start < length and start < min(until, length)
        ]

    def _touch(self, segment: Segment) -> None:
        segment.last_used_s = self._clock()
        self._touched.add(segment)

    # -- the reader -------------------------------------------------------------

    def entry(self, segment: Segment, index: int) -> Entry | None:
        """Return a file to read; None where it is gone."""
        with self._lock:
            return segment.entries.get(index)

    def snapshots(self, segment: Segment) -> list[int]:
        """Return the indices of a segment's snapshots on disk, the last first."""
        with self._lock:
            return sorted(segment.entries.keys() - {ROWS}, reverse=True)

    def release(self, trail: Trail) -> None:
        """Give back the pin of ``plan``."""
        if trail:
            with self._lock:
                trail[-1][0].pins -= 1

    def used(self, trail: Trail) -> None:
        """Count a restore."""
        with self._lock:
            for segment, _ in trail:
                segment.uses += 1
                self._touch(segment)

    def take_out(self, segment: Segment, bad: Entry) -> Removed | None:
        """Take out a bad file, with all that cannot be restored without it.

        Returns:
            What else is to be deleted; None where the file was gone already.
        """
        with self._lock:
            if segment.entries.get(bad.index) != bad:
                return None
            self._forest.take_file(segment, bad.index)
            if bad.index != ROWS:
                return Removed([], [])
            removed = self._forest.detach(segment)
            return Removed([bad.segment, *removed.segments], removed.entries)

    # -- the writer -------------------------------------------------------------

    def parent(self, segment: Segment) -> bytes | None:
        """Return the id of a segment's parent; None where it left the tree."""
        with self._lock:
            return None if segment.parent is None else segment.parent.id

    def stored(self, segment: Segment, entries: Collection[Entry]) -> bool:
        """Note files that have been written; False where they have no place any more."""
        with self._lock:
            attached = segment.parent is not None
            if attached:
                self._forest.add_files(segment, entries)
            segment.queued -= {entry.index for entry in entries}
            segment.pins -= 1
            return attached

    def not_stored(self, segment: Segment, indices: Collection[int]) -> None:
        """Take back the place of a piece that will not be written."""
        with self._lock:
            if ROWS in indices and segment.parent is not None:
                # What continues it waits behind it and will find itself detached.
                self._forest.detach(segment)
            segment.queued -= set(indices)
            segment.pins -= 1

    def evict(self, nbytes: int, max_bytes: int) -> Removed:
        """Take out what is worth least until that many bytes are free, or all is."""
        with self._lock:
            return self._forest.evict(nbytes, max_bytes)

    def take_touched(self) -> list[tuple[bytes, int, float]]:
        """Return id, uses and last use of what was used since the last call."""
        with self._lock:
            touched, self._touched = self._touched, set()
            return [(s.id, s.uses, s.last_used_s) for s in touched if s.on_disk]

    def check(self) -> None:
        """Verify the invariants of the forest.

        Raises:
            AssertionError: One of them does not hold.
        """
        with self._lock:
            self._forest.check()


def _known(segment: Segment) -> set[int]:
    return segment.queued | segment.entries.keys()
