"""Streams that decode together, their state in one allocation.

A ``RowGroup`` keeps the state of its members in arrays whose first axis is the member's
row: keys and values ``[rows, heads, capacity, dim]``, each sequence from index 0 on. One
write and one attention call serve all rows, each row at its own position, so that a step
costs the host the same for one stream and for many. A stream that joins is copied once
into a free row; one that leaves is copied out, and nobody else moves. A group of one row
is the stream's own buffer, taken over as it is.

What a forward sees of a group are stand-ins for mlx-lm's caches. They know positions as
arrays and shapes as numbers, so that a forward can be traced once and replayed. A stream
may be put back by one token, the one that was read ahead of knowing that the stream had
ended: keys behind the offset are never looked at, a ring has a row to spare, and of a
recurrent state the one before is kept. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

GRID_TOKENS = 256
"""Capacities are multiples of it. Each is a shape that a forward is traced for."""

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Rows of a group; some may be free. The first that is enough is taken, beyond the last
one multiples of 8."""

Arrays = list[mx.array]


def rounded(tokens: int) -> int:
    """Return the capacity that holds ``tokens`` tokens."""
    return -(-tokens // GRID_TOKENS) * GRID_TOKENS


def row_count(members: int) -> int:
    """Return how many rows a group of that many members has."""
    enough = (count for count in ROW_COUNTS if count >= members)
    return next(enough, -(-members // 8) * 8)


# -- what a forward sees --------------------------------------------------------


class Positions:
    """Where the rows of one group write and what they may look at, in one forward.

    Args:
        offsets: ``[rows]`` int32: tokens that each row holds.
        length: Attention looks at so many indices; all that is held lies below it.
    """

    def __init__(self, offsets: mx.array, length: int) -> None:
        self.offsets = offsets
        self.following = offsets + 1
        self.length = length
        self._at: dict[int | None, mx.array] = {}
        self._masks: dict[tuple[int | None, int | None], mx.array] = {}

    def at(self, ring: int | None) -> mx.array:
        """Return the index that each row writes to; a ring's begins again at its end."""
        if ring not in self._at:
            self._at[ring] = self.offsets if ring is None else self.offsets % ring
        return self._at[ring]

    def mask(self, ring: int | None, window: int | None) -> mx.array:
        """Return ``[rows, 1, 1, length]`` bool: which indices hold a token that the new
        one may look at, itself included.

        Args:
            ring: Rows of the ring; None where an index is a position.
            window: How many of the last tokens may be looked at; None for all.
        """
        if (ring, window) not in self._masks:
            length = self.length if ring is None else min(self.length, ring)
            indices = mx.arange(length)
            last = self.offsets[:, None]
            mask = indices <= last
            if ring is not None:
                assert window is not None
                mask = mask & ((last - indices) % ring < window)
            elif window is not None:
                mask = mask & (last - indices < window)
            self._masks[ring, window] = mask[:, None, None]
        return self._masks[ring, window]


class RowsCache:
    """Stands for mlx-lm's cache of one attention layer, for all rows of a group.

    Args:
        keys, values: ``[rows, heads, capacity, dim]``; replaced, never written to.
        positions: Of the rows.
        window: Size of the sliding window; None without one.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, positions: Positions, window: int | None
    ) -> None:
        self.keys = keys
        self.values = values
        self.offset = positions.offsets
        self._positions = positions
        self._window = window
        self._ring = None if window is None else window + 1

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return the mask of one new token for each row; see ``Positions.mask``."""
        assert length == 1, "every row is one token"
        limits = [limit for limit in (self._window, window_size) if limit is not None]
        return self._positions.mask(self._ring, min(limits, default=None))

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write one token for each row, ``[rows, heads, 1, dim]``."""
        at = self._positions.at(self._ring)
        self.keys = _written(self.keys, keys, at)
        self.values = _written(self.values, values, at)
        self.offset = self._positions.following
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what there is to look at, ``[rows, heads, length, dim]`` each."""
        length = self._positions.length
        if length >= self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:, :, :length], self.values[:, :, :length]


def _written(buffer: mx.array, rows: mx.array, at: mx.array) -> mx.array:
    if len(at) == 1:
        return mx.slice_update(buffer, rows, at, axes=(2,))
    indices = mx.broadcast_to(at[:, None, None, None], rows.shape)
    return mx.put_along_axis(buffer, indices, rows, axis=2)


# -- what a group holds ---------------------------------------------------------


class _Leaf(Protocol):
    """How the state of one layer is taken from mlx-lm's cache and given back."""

    def taken(self, cache: Any, offset: int, capacity: int) -> Arrays:
        """Take the state out of ``cache``, which is hollow afterwards."""

    def give_back(self, cache: Any, row: Arrays, offset: int, *, own: bool) -> None:
        """Put one row into ``cache``; ``own`` if nobody else uses these arrays."""

    def grown(self, arrays: Arrays, capacity: int) -> Arrays: ...

    def stand_in(self, arrays: Arrays, positions: Positions) -> Any:
        """Return the cache that a forward sees."""

    def after(self, stand_in: Any) -> Arrays:
        """Return what the forward left in it."""


class _KVLeaf:
    """Keys and values of all tokens; a token's index is its position."""

    def taken(self, cache: Any, offset: int, capacity: int) -> Arrays:
        arrays = [cache.keys, cache.values]
        cache.keys = cache.values = None
        return self.grown(arrays, capacity)

    def give_back(self, cache: Any, row: Arrays, offset: int, *, own: bool) -> None:
        if not own:
            row = [mx.contiguous(a[:, :, : rounded(offset)]) for a in row]
        cache.keys, cache.values = row
        cache.offset = offset

    def grown(self, arrays: Arrays, capacity: int) -> Arrays:
        return [_padded(array, capacity) for array in arrays]

    def stand_in(self, arrays: Arrays, positions: Positions) -> RowsCache:
        keys, values = arrays
        return RowsCache(keys, values, positions, None)

    def after(self, stand_in: Any) -> Arrays:
        return [stand_in.keys, stand_in.values]


class _RingLeaf:
    """Keys and values of the last ``window`` tokens and one more; position ``p`` lies at
    ``p % (window + 1)``. While nothing has been overwritten it may be shorter."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._ring = window + 1

    def taken(self, cache: Any, offset: int, capacity: int) -> Arrays:
        held = min(offset, self._window)
        first = (offset - held) % self._ring
        size = min(self._ring, capacity)
        arrays = []
        for array in (cache.keys, cache.values):
            rows = cache._temporal_order(array)[..., -held:, :]
            ahead = rows[..., : self._ring - first, :]
            around = rows[..., self._ring - first :, :]
            gap = first - around.shape[2]
            arrays.append(
                _padded(mx.concatenate([around, _zeros(rows, gap), ahead], axis=2), size)
            )
        cache.keys = cache.values = None
        return arrays

    def give_back(self, cache: Any, row: Arrays, offset: int, *, own: bool) -> None:
        held = min(offset, self._window)
        first = (offset - held) % self._ring
        parts = []
        for array in row:
            ahead = array[:, :, first : min(first + held, self._ring)]
            around = array[:, :, : max(first + held - self._ring, 0)]
            parts.append(mx.contiguous(mx.concatenate([ahead, around], axis=2)))
        cache.keys, cache.values = parts
        cache.offset, cache._idx = offset, held

    def grown(self, arrays: Arrays, capacity: int) -> Arrays:
        return [_padded(array, min(self._ring, capacity)) for array in arrays]

    def stand_in(self, arrays: Arrays, positions: Positions) -> RowsCache:
        keys, values = arrays
        return RowsCache(keys, values, positions, self._window)

    def after(self, stand_in: Any) -> Arrays:
        return [stand_in.keys, stand_in.values]


class _StateLeaf:
    """Recurrent state, of one size; a forward replaces it."""

    def __init__(self, cache: ArraysCache) -> None:
        self._kind = type(cache)

    def taken(self, cache: Any, offset: int, capacity: int) -> Arrays:
        arrays, cache.cache = cache.cache, [None] * len(cache.cache)
        return arrays

    def give_back(self, cache: Any, row: Arrays, offset: int, *, own: bool) -> None:
        # A bare part would keep the state of every row in memory.
        cache.cache = row if own else [mx.contiguous(array) for array in row]

    def grown(self, arrays: Arrays, capacity: int) -> Arrays:
        return arrays

    def stand_in(self, arrays: Arrays, positions: Positions) -> Any:
        cache = self._kind(len(arrays))
        cache.cache = [*arrays]
        return cache

    def after(self, stand_in: Any) -> Arrays:
        return [*stand_in.cache]


def _padded(array: mx.array, size: int) -> mx.array:
    missing = size - array.shape[2]
    if missing <= 0:
        return array
    return mx.concatenate([array, _zeros(array, missing)], axis=2)


def _zeros(like: mx.array, length: int) -> mx.array:
    return mx.zeros((*like.shape[:2], max(length, 0), like.shape[3]), like.dtype)


class GroupLayout:
    """How the layers of a model lie in its groups.

    Args:
        layers: mlx-lm caches of the model that hold at least one token.

    Raises:
        TypeError: One of them is of a kind that groups cannot hold.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._shape = _shape(layers)
        self._kinds = [type(cache) for cache in flat(layers)]
        self.leaves: list[_Leaf] = [_leaf_of(cache) for cache in flat(layers)]
        self.cuttable = [
            index for index, leaf in enumerate(self.leaves) if isinstance(leaf, _KVLeaf)
        ]

    def holds(self, layers: Sequence[Any]) -> bool:
        """Say whether caches are of the kinds that lie in these groups."""
        return [type(cache) for cache in flat(layers)] == self._kinds

    def stand_ins(self, arrays: Sequence[Arrays], positions: Positions) -> list[Any]:
        """Return what a forward takes as its caches."""
        leaves = (
            leaf.stand_in(each, positions)
            for leaf, each in zip(self.leaves, arrays, strict=True)
        )
        return _tree(self._shape, leaves)

    def after(self, stand_ins: Sequence[Any]) -> list[Arrays]:
        """Return what a forward left in its caches."""
        return [
            leaf.after(each)
            for leaf, each in zip(self.leaves, flat(stand_ins), strict=True)
        ]


def _leaf_of(cache: Any) -> _Leaf:
    if type(cache) is KVCache:
        return _KVLeaf()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return _RingLeaf(cache.max_size)
    if isinstance(cache, ArraysCache) and all(each is not None for each in cache.cache):
        return _StateLeaf(cache)
    raise TypeError(f"a {type(cache).__name__} cannot lie in one allocation with others")


def flat(layers: Sequence[Any]) -> Iterator[Any]:
    """Yield the caches inside of ``CacheList``s too."""
    for layer in layers:
        if isinstance(layer, CacheList):
            yield from flat(layer.caches)
        else:
            yield layer


def _shape(layers: Sequence[Any]) -> list[Any]:
    """Return None for a cache and a list for a ``CacheList``; it holds no state."""
    return [
        _shape(layer.caches) if isinstance(layer, CacheList) else None for layer in layers
    ]


def _tree(shape: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    return [
        next(leaves) if inner is None else CacheList(*_tree(inner, leaves))
        for inner in shape
    ]


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
            state = isinstance(leaf, _StateLeaf)
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

        for arrays in self.arrays:
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
            before if isinstance(leaf, _StateLeaf) else []
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
