"""The index of segments by token prefix: a tree for each ``StateKey``, in memory.

A segment is the run ``[start, end)`` of every prompt that passes through it. State on
disk cannot be cut, so where a prompt leaves a segment in its middle, the new segment
begins there and names the old one as its parent: nothing is written twice, and a reader
of the new one takes the old one's rows up to there. So a walk down a tree uses each
segment from its start to the start of the next, and is as exact as one in memory.

Invariants, which ``check()`` verifies:

1. A segment has tokens, and starts inside its parent (after its first token) or at its
   end; those after a root start at 0.
2. Of the children of a segment, no two have both the same start and the same first
   token; a child that starts inside has another token there than the segment.
3. A segment on disk has a parent on disk; one that is not waits to be written. Snapshot
   indices lie in ``(start, end]``.
4. ``nbytes``, ``files`` and ``segments`` are the sums over what is on disk.

The catalog owns the forest and guards it with its lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from mtplx.session.disk.format import ROWS, Entry, SegmentRow, root_id, segment_id
from mtplx.session.state import TokenRun
from mtplx.session.tree import as_run, common_length
from mtplx.types import StateKey

PROTECTED_SHARE = 0.8
"""Segments used twice or more stay before others while they are no more than this share
of all bytes; a folder full of what was once popular would take in nothing new."""


class Segment:
    """One run of tokens.

    Attributes:
        parent: What it continues; None for a root, and once it left the tree.
        entries: Its files on disk by index: ``ROWS``, and those of snapshots.
        queued: Indices of files that wait to be written.
        uses: Times it was stored (1) or restored.
        last_used_s: Unix time of the last use.
        pins: Reads and writes that go on; what is pinned, or leads there, stays.
    """

    __slots__ = (
        "children",
        "entries",
        "id",
        "last_used_s",
        "parent",
        "pins",
        "queued",
        "start",
        "tokens",
        "uses",
    )

    def __init__(
        self, id: bytes, start: int, tokens: TokenRun, parent: Segment | None
    ) -> None:
        self.id = id
        self.start = start
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, int], Segment] = {}
        self.entries: dict[int, Entry] = {}
        self.queued: set[int] = set()
        self.uses = 1
        self.last_used_s = 0.0
        self.pins = 0

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.tokens)

    @property
    def on_disk(self) -> bool:
        """Its rows can be read."""
        return ROWS in self.entries

    @property
    def removable(self) -> bool:
        """Nothing continues it and nobody uses it."""
        return self.on_disk and not self.children and not self.pins

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(entry.nbytes for entry in self.entries.values())


Trail = list[tuple[Segment, int]]
"""Segments from the root down, each with the index up to which it is used."""


@dataclass(frozen=True)
class Removed:
    """What a tree no longer holds, to be deleted from the disk."""

    segments: list[bytes]
    entries: list[Entry]


class Forest:
    """The trees of all keys."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.files = 0
        self.segments = 0
        self._roots: dict[bytes, Segment] = {}

    def __iter__(self) -> Iterator[Segment]:
        for root in self._roots.values():
            yield from _below(root)

    # -- finding ----------------------------------------------------------------

    def walk(self, key: StateKey, tokens: TokenRun, *, queued: bool) -> tuple[Trail, int]:
        """Follow ``tokens`` down: the segments entered, and how far they agree.

        ``queued`` says whether those that wait to be written count.
        """
        trail: Trail = []
        segment, depth = self._roots.get(root_id(key)), 0
        while segment is not None and depth < len(tokens):
            child = segment.children.get((depth, int(tokens[depth])))
            if child is None or not (queued or child.on_disk):
                break
            depth += common_length(child.tokens, tokens[depth:])
            trail.append((child, depth))
            segment = child
        return trail, depth

    def match(self, key: StateKey, tokens: TokenRun) -> tuple[int, Trail]:
        """Return how many tokens the files restore, less than all, and the walk."""
        trail, depth = self.walk(key, tokens, queued=False)
        usable = min(depth, max(len(tokens) - 1, 0))
        if key.any_prefix:
            return usable, trail
        indices = (
            index
            for segment, until in trail
            for index in segment.entries
            if index <= min(until, usable)
        )
        return max(indices, default=0), trail

    # -- changing ---------------------------------------------------------------

    def root(self, id: bytes) -> Segment:
        """Return the root of a tree, which holds no tokens."""
        if id not in self._roots:
            self._roots[id] = Segment(id, 0, as_run(()), None)
        return self._roots[id]

    def add(self, parent: Segment, start: int, tokens: TokenRun) -> Segment:
        """Add a segment that has no files yet."""
        segment = Segment(segment_id(parent.id, start, tokens), start, tokens, parent)
        parent.children[start, int(tokens[0])] = segment
        return segment

    def add_files(self, segment: Segment, entries: Collection[Entry]) -> None:
        """Note files on disk that the segment did not have."""
        segment.entries |= {entry.index: entry for entry in entries}
        self.nbytes += sum(entry.nbytes for entry in entries)
        self.files += len(entries)
        self.segments += any(entry.index == ROWS for entry in entries)

    def take_file(self, segment: Segment, index: int) -> None:
        """Note that a file is gone. Without its rows a segment is to be detached."""
        self.nbytes -= segment.entries.pop(index).nbytes
        self.files -= 1
        self.segments -= index == ROWS

    def detach(self, segment: Segment) -> Removed:
        """Take out a segment and all that continues it."""
        assert segment.parent is not None
        del segment.parent.children[segment.start, int(segment.tokens[0])]
        removed = Removed([], [])
        for gone in [segment, *_below(segment)]:
            if gone.on_disk:
                removed.segments.append(gone.id)
            removed.entries.extend(gone.entries.values())
            for index in [*gone.entries]:
                self.take_file(gone, index)
            gone.parent = None
        return removed

    def evict(self, nbytes: int, max_bytes: int) -> Removed:
        """Take out leaves worth least until that many bytes are free, or none is left.

        Used once goes before used twice or more, then the least recently used.
        """
        protected = sum(segment.nbytes for segment in self if segment.uses > 1)
        protect = protected <= PROTECTED_SHARE * max_bytes

        def worth(leaf: Segment) -> tuple[bool, float, bytes, Segment]:
            return protect and leaf.uses > 1, leaf.last_used_s, leaf.id, leaf

        leaves = [worth(segment) for segment in self if segment.removable]
        heapq.heapify(leaves)
        removed = Removed([], [])
        goal = self.nbytes - nbytes
        while leaves and self.nbytes > goal:
            leaf = heapq.heappop(leaves)[-1]
            parent = leaf.parent
            gone = self.detach(leaf)
            removed.segments.extend(gone.segments)
            removed.entries.extend(gone.entries)
            if parent is not None and parent.removable:
                heapq.heappush(leaves, worth(parent))
        return removed

    def load(
        self,
        roots: Collection[bytes],
        rows: Collection[SegmentRow],
        entries: Mapping[bytes, Mapping[int, Entry]],
    ) -> list[SegmentRow]:
        """Build the trees from what the index holds; return rows that do not fit in.

        A row fits when its id follows from its parent and its tokens, its parent fits,
        and it has rows; so a changed byte in a row takes out that row and what
        continues it.
        """
        known = {id: self.root(id) for id in roots}
        rejected = []
        for row in sorted(rows, key=lambda row: row.start):
            parent, files = known.get(row.parent), entries.get(row.id, {})
            if parent is None or ROWS not in files or not _continues(parent, row):
                rejected.append(row)
                continue
            segment = known[row.id] = self.add(parent, row.start, row.tokens)
            segment.uses, segment.last_used_s = row.uses, row.last_used_s
            inside = [i for i in files if i == ROWS or row.start < i <= row.end]
            self.add_files(segment, [files[index] for index in inside])
        return rejected

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            AssertionError: One of them does not hold.
        """
        for segment in self:
            parent = segment.parent
            assert parent is not None
            assert len(segment.tokens) > 0
            assert parent.children[segment.start, int(segment.tokens[0])] is segment
            assert _may_start(parent, segment.start)
            if segment.start < parent.end:
                assert segment.tokens[0] != parent.tokens[segment.start - parent.start]
            if segment.on_disk:
                assert parent.on_disk or parent.parent is None
            else:
                assert ROWS in segment.queued
            snapshots = segment.entries.keys() - {ROWS}
            assert all(segment.start < index <= segment.end for index in snapshots)
            assert segment.pins >= 0
        assert self.segments == sum(segment.on_disk for segment in self)
        assert self.files == sum(len(segment.entries) for segment in self)
        assert self.nbytes == sum(segment.nbytes for segment in self)


def _below(segment: Segment) -> Iterator[Segment]:
    stack = [*segment.children.values()]
    while stack:
        below = stack.pop()
        stack.extend(below.children.values())
        yield below


def _may_start(parent: Segment, start: int) -> bool:
    return start == 0 if parent.parent is None else parent.start < start <= parent.end


def _continues(parent: Segment, row: SegmentRow) -> bool:
    return (
        len(row.tokens) > 0
        and _may_start(parent, row.start)
        and (row.start, int(row.tokens[0])) not in parent.children
        and segment_id(parent.id, row.start, row.tokens) == row.id
    )
