"""How the state of a model's layers lies in a group of streams, and what a forward sees.

Of each layer a leaf knows how state is taken out of mlx-lm's cache, kept in arrays whose
first axis is the stream's row, and given back. For a forward the leaves make stand-ins
for mlx-lm's caches, which know positions as arrays and shapes as numbers, so that a
forward can be traced once and replayed. A ring has a row to spare, so that the token
read last can be taken back. Who is in which row is ``group.py``'s. Runs on the thread
that owns MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

GRID_TOKENS = 256
"""Capacities are multiples of it. Each is a shape that a forward is traced for."""

Arrays = list[mx.array]


def rounded(tokens: int) -> int:
    """Return the capacity that holds ``tokens`` tokens."""
    return -(-tokens // GRID_TOKENS) * GRID_TOKENS


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


class Leaf(Protocol):
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


class StateLeaf:
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
        self.leaves: list[Leaf] = [_leaf_of(cache) for cache in flat(layers)]
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


def _leaf_of(cache: Any) -> Leaf:
    if type(cache) is KVCache:
        return _KVLeaf()
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return _RingLeaf(cache.max_size)
    if isinstance(cache, ArraysCache) and all(each is not None for each in cache.cache):
        return StateLeaf(cache)
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
