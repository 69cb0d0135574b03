"""Streams that decode together, their state in one allocation.

A ``RowGroup`` keeps the state of its members in arrays whose first axis is the member's
row: keys and values ``[rows, heads, capacity, dim]``, each sequence from index 0 on. One
write and one attention call serve all rows, each row at its own position, so that a step
costs the host the same for one stream and for many. A stream that joins is copied once
into a free row; one that leaves is copied out, and nobody else moves. A group of one row
is the stream's own buffer, taken over as it is.

A stream may be put back by one token, the one that was read ahead of knowing that the
stream had ended: keys behind the offset are never looked at, a ring has a row to spare,
and of a recurrent state the one before is kept. How layers lie in it is ``layout.py``'s.
Runs on the thread that owns MLX.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mtplx.models.layout import Arrays, GroupLayout, StateLeaf, flat, rounded

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Rows of a group; some may be free. The first that is enough is taken, beyond the last
one multiples of 8."""


def row_count(members: int) -> int:
    """Return how many rows a group of that many members has."""
    enough = (count for count in ROW_COUNTS if count >= members)
    return next(enough, -(-members // 8) * 8)


class Member(Protocol):
    """A stream whose state can lie in a group."""

    place: tuple[RowGroup, int] | None

    def leave(self) -> None: ...


class RowGroup:
    """The state of several streams. See the head of this file.

    Made by ``of_one``, filled by ``add``. It knows its members weakly: the row of one
    that is gone is free.

    Attributes:
        offsets: Tokens that each row holds, those of a forward under way included.
        arrays: For each layer its arrays, the row first.
        capacity: Tokens that each row has room for.
    """

    def __init__(
        self, layout: GroupLayout, arrays: list[Arrays], offset: int, capacity: int
    ) -> None:
        self._layout = layout
        self.arrays = arrays
        self.offsets = [offset]
        self.capacity = capacity
        self._members: list[weakref.ref[Member] | None] = [None]
        self._under_way = 0
        self._before: list[Arrays] = []

    @classmethod
    def of_one(
        cls, layout: GroupLayout, member: Member, layers: Sequence[Any], offset: int
    ) -> RowGroup:
        """Take the state of a stream out of its own caches, which are hollow afterwards."""
        capacities = [
            cache.keys.shape[2] for cache in flat(layers) if type(cache) is KVCache
        ]
        capacity = rounded(max([offset + 1, *capacities]))
        arrays = [
            leaf.taken(cache, offset, capacity)
            for leaf, cache in zip(layout.leaves, flat(layers), strict=True)
        ]
        group = cls(layout, arrays, offset, capacity)
        group._seat(member, 0)
        return group

    @property
    def rows(self) -> int:
        """Rows, free ones included."""
        return len(self.offsets)

    @property
    def members(self) -> list[Member | None]:
        """The stream of each row, None for a free one."""
        return [None if ref is None else ref() for ref in self._members]

    @property
    def length(self) -> int:
        """The capacity that its longest stream needs for one more token."""
        longest = max(
            offset
            for offset, member in zip(self.offsets, self.members, strict=True)
            if member is not None
        )
        return min(rounded(longest + 1), self.capacity)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row, room included."""
        return sum(a.nbytes for arrays in self.arrays for a in arrays) // self.rows

    @property
    def free_nbytes(self) -> int:
        """Bytes of the rows that are free."""
        return self.row_nbytes * self.members.count(None)

    @property
    def cuttable_row_nbytes(self) -> int:
        """Of these, the bytes of the layers that can be cut."""
        arrays = (a for index in self._layout.cuttable for a in self.arrays[index])
        return sum(array.nbytes for array in arrays) // self.rows

    def cuttable(self, row: int) -> list[Arrays]:
        """Return the row's keys and values, for each layer that can be cut.

        Not evaluated. A view of them that is held makes the next write copy all.
        """
        return [
            [array[row : row + 1] for array in self.arrays[index]]
            for index in self._layout.cuttable
        ]

    def growth_nbytes(self, other: RowGroup) -> int:
        """Return the bytes that it would take more, to take in another group's stream."""
        rows = self.rows if None in self.members else row_count(self.rows + 1)
        capacity = max(self.capacity, rounded(other.offsets[0] + 1))
        grown = self.row_nbytes * rows * capacity // self.capacity
        return grown - self.row_nbytes * self.rows - other.row_nbytes

    # -- who is in it -----------------------------------------------------------

    def add(self, member: Member) -> None:
        """Copy a stream from its group of one, which is empty afterwards, into a free
        row."""
        assert member.place is not None
        other = member.place[0]
        assert other.rows == 1
        if None not in self.members:
            self._resize(range(self.rows), row_count(self.rows + 1))
        row = self.members.index(None)
        self.reserve(other.offsets[0] + 1)
        for mine, its in zip(self.arrays, other.arrays, strict=True):
            for target, source in zip(mine, its, strict=True):
                if source.shape[1:] == target.shape[1:]:
                    target[row : row + 1] = source
                else:  # Keys or values, with more or less room behind them.
                    size = min(other.length, source.shape[2], target.shape[2])
                    target[row : row + 1, :, :size] = source[:, :, :size]
        self.offsets[row] = other.offsets[0]
        other.arrays = []
        self._seat(member, row)
        mx.eval(self.arrays)

    def leave(self, row: int, layers: Sequence[Any], offset: int) -> None:
        """Give a row's state back to its own caches.

        Args:
            row: Free afterwards.
            layers: The stream's hollow caches.
            offset: Tokens to keep: as many as the row holds, or one less while a forward
                is under way.
        """
        back = offset < self.offsets[row]
        assert self.offsets[row] - back == offset
        alone = self.rows == 1
        for index, (leaf, cache) in enumerate(
            zip(self._layout.leaves, flat(layers), strict=True)
        ):
            state = isinstance(leaf, StateLeaf)
            arrays = (self._before if back and state else self.arrays)[index]
            part = arrays if alone else [array[row : row + 1] for array in arrays]
            leaf.give_back(cache, part, offset, own=alone)
        if alone:
            self.arrays, self._before = [], []
        else:
            mx.eval([cache.state for cache in flat(layers)])
        # A free row is computed like the others; nothing of value is in it.
        self.offsets[row], self._members[row] = 0, None

    def only(self, wanted: Sequence[Member]) -> None:
        """Let all others leave, and give up rows where half of them are free."""
        for member in self.members:
            if member is not None and all(member is not each for each in wanted):
                member.leave()
        free = self.members.count(None)
        if self.rows > 2 and 2 * free >= self.rows:
            self.compact()

    def compact(self) -> None:
        """Give up the free rows; the others move."""
        members = self.members
        kept = [row for row, member in enumerate(members) if member is not None]
        if len(kept) < self.rows:
            self._resize(kept, len(kept))
            for row, old in enumerate(kept):
                member = members[old]
                assert member is not None
                self._seat(member, row)

    def _seat(self, member: Member, row: int) -> None:
        self._members[row] = weakref.ref(member)
        member.place = (self, row)

    def _resize(self, kept: Sequence[int], rows: int) -> None:
        order, free = mx.array([*kept]), rows - len(kept)

        def resized(array: mx.array) -> mx.array:
            array = array if len(kept) == self.rows else array[order]
            return mx.concatenate([array, mx.zeros((free, *array.shape[1:]), array.dtype)])

        for arrays in (*self.arrays, *self._before):
            arrays[:] = [resized(array) for array in arrays]
            mx.eval(arrays)  # One layer at a time is there twice.
        self.offsets = [*(self.offsets[row] for row in kept), *[0] * free]
        self._members = [*(self._members[row] for row in kept), *[None] * free]

    def reserve(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in each row."""
        if tokens <= self.capacity:
            return
        self.capacity = rounded(tokens)
        self.arrays = [
            leaf.grown(arrays, self.capacity)
            for leaf, arrays in zip(self._layout.leaves, self.arrays, strict=True)
        ]

    # -- a forward --------------------------------------------------------------

    def begun(self, arrays: list[Arrays]) -> None:
        """Take what a forward will have made of the state, one token for each row."""
        self._under_way += 1
        self._before = [
            before if isinstance(leaf, StateLeaf) else []
            for leaf, before in zip(self._layout.leaves, self.arrays, strict=True)
        ]
        self.arrays = arrays
        self.offsets = [
            offset + (member is not None)
            for offset, member in zip(self.offsets, self.members, strict=True)
        ]

    def done(self, *, keep_before: bool) -> None:
        """A forward is complete.

        Args:
            keep_before: Somebody will leave as of before it; else nobody is put back any
                more.
        """
        self._under_way -= 1
        if not self._under_way and not keep_before:
            self._before = []
