"""What a model's KV cache holds, and how state is cut out of it and put back.

The caches themselves are mlx-lm's. This file decides which kind each layer has, takes
state out in the two forms the SessionBank stores (rows for layers that can be cut at
any token, snapshots for the others), and builds a cache from them.

Rows are views of the buffer that a sequence runs in: what is written later lies behind
them. They are read through mlx-lm's cache object, never through an array of it: a
second reference to an array would turn the next write into a copy of all of it.
Snapshots have memory of their own. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mtplx.models.group import RowGroup
from mtplx.models.layout import GroupLayout, flat


class CacheKind(StrEnum):
    """What can be done with the cache of one layer."""

    TRIMMABLE = "trimmable"
    """One row for each token: any prefix can be kept, any suffix cut off."""

    WINDOWED = "windowed"
    """The last rows only: once older ones are gone, there is no way back."""

    RECURRENT = "recurrent"
    """One state for all tokens read: only a snapshot brings it back."""


def cache_kind(layer_cache: Any) -> CacheKind:
    """Return the kind of one layer's cache.

    An unknown class counts as recurrent, which is always right: it is only restored
    from an exact copy. A ``CacheList`` is as restricted as its most restricted part.
    """
    kinds = {_leaf_kind(leaf) for leaf in flat([layer_cache])}
    for kind in (CacheKind.RECURRENT, CacheKind.WINDOWED):
        if kind in kinds:
            return kind
    return CacheKind.TRIMMABLE


def _leaf_kind(leaf: Any) -> CacheKind:
    # Exact types: a subclass may keep more than its parent knows.
    if type(leaf) in (KVCache, QuantizedKVCache):
        return CacheKind.TRIMMABLE
    if isinstance(leaf, RotatingKVCache | ChunkedKVCache):
        return CacheKind.WINDOWED
    return CacheKind.RECURRENT


def split_leaves(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the leaves that can be cut, and the others."""
    leaves = list(flat(layers))
    cuttable = [leaf for leaf in leaves if _leaf_kind(leaf) is CacheKind.TRIMMABLE]
    others = [leaf for leaf in leaves if _leaf_kind(leaf) is not CacheKind.TRIMMABLE]
    return cuttable, others


class KVBuffer:
    """The memory of one sequence, for the layers that can be cut.

    Args:
        leaves: mlx-lm caches. The sequence that runs in them only appends.

    Attributes:
        place: The group and row that the sequence runs in meanwhile, its caches being
            hollow; None while they hold it.
    """

    def __init__(self, leaves: Sequence[Any]) -> None:
        self.leaves = tuple(leaves)
        self.place: tuple[RowGroup, int] | None = None

    def arrays(self) -> list[Sequence[mx.array]]:
        """Return the arrays of each leaf that holds anything, ``[1, heads, rows, dim]``.

        For reading at once: a reference that is held makes the next write a copy.
        """
        if self.place is not None:
            group, row = self.place
            return [*group.cuttable(row)]
        return [get_arrays(leaf) for leaf in self.leaves if not leaf.empty()]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        if self.place is not None:
            return self.place[0].cuttable_row_nbytes
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.empty())

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token."""
        return sum(
            array.nbytes // array.shape[-2] for arrays in self.arrays() for array in arrays
        )

    def rows(self, start: int, end: int) -> KVRows:
        """Return a view of rows ``[start, end)``."""
        return KVRows(self, start, end)

    def copy(self, start: int, end: int) -> KVRows:
        """Return rows ``[start, end)`` in a buffer of their own, with no spare room."""
        twins = []
        for leaf, arrays in zip(self.leaves, self.arrays(), strict=True):
            twin = copy.copy(leaf)
            set_arrays(twin, [mx.contiguous(array[..., start:end, :]) for array in arrays])
            twin.offset = end - start
            twins.append(twin)
        mx.eval([get_arrays(twin) for twin in twins])
        return KVRows(KVBuffer(twins), 0, end - start)

    def intact(self) -> bool:
        """Say whether the memory can still be read after a forward has failed."""
        try:
            mx.eval(self.arrays())
        except Exception:
            return False
        return True


@dataclass(frozen=True)
class KVRows:
    """A view of the rows ``[start, end)`` of a buffer."""

    buffer: KVBuffer
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        return len(self) * self.buffer.row_nbytes

    def slice(self, start: int, end: int) -> KVRows:
        """Return a view of rows ``[start, end)`` of these."""
        return KVRows(self.buffer, self.start + start, self.start + end)


def get_arrays(leaf: Any) -> tuple[mx.array, ...]:
    """Return keys and values, ``[1, heads, rows, dim]``; a quantized leaf has three of
    each."""
    if type(leaf) is KVCache:
        return (leaf.keys, leaf.values)
    return (*leaf.keys, *leaf.values)


def set_arrays(leaf: Any, arrays: Sequence[mx.array]) -> None:
    if type(leaf) is KVCache:
        leaf.keys, leaf.values = arrays
    else:
        leaf.keys, leaf.values = list(arrays[:3]), list(arrays[3:])


@dataclass(frozen=True)
class StateSize:
    """What the state of one sequence weighs.

    Attributes:
        row_bytes: Of each token, in the layers that can be cut.
        step_tokens: Their buffers grow by this many rows.
        windows: For each windowed layer the bytes of a row, and its most rows.
        fixed_bytes: Of the layers whose state has one size.
    """

    row_bytes: int
    step_tokens: int
    windows: tuple[tuple[int, int], ...]
    fixed_bytes: int

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of ``tokens`` tokens."""
        rows = -(-tokens // self.step_tokens) * self.step_tokens
        windowed = sum(each * min(tokens, most) for each, most in self.windows)
        return self.row_bytes * rows + windowed + self.fixed_bytes


class PromptCache:
    """The KV cache of one sequence, and what is needed to go on from it.

    While it decodes, its state lies in a row of a ``RowGroup``, and its own caches are
    hollow; whoever asks for ``layers`` takes it out of there.

    Attributes:
        offset: Tokens whose state is complete. It moves only once they are evaluated.
        buffer: The part of the state that can be cut.
        logits: ``[vocab]``, after the last token; None while only prefilled.
        pending: A token that ``Model.decode`` has chosen and not yet read.
    """

    def __init__(
        self, layers: list[Any], offset: int = 0, buffer: KVBuffer | None = None
    ) -> None:
        self._layers = layers
        self.offset = offset
        self.buffer = KVBuffer(split_leaves(layers)[0]) if buffer is None else buffer
        self.logits: mx.array | None = None
        self.pending: int | None = None

    @property
    def layers(self) -> list[Any]:
        """One mlx-lm cache for each layer, as the model's forward takes them."""
        self.leave()
        return self._layers

    @property
    def place(self) -> tuple[RowGroup, int] | None:
        """The group and row that hold its state; None where its own caches do."""
        return self.buffer.place

    @place.setter
    def place(self, place: tuple[RowGroup, int] | None) -> None:
        self.buffer.place = place

    def enter(self, layout: GroupLayout) -> None:
        """Let a group of its own take the state over, if it can hold it. Hardly anything
        is copied."""
        if self.place is None and layout.holds(self._layers):
            RowGroup.of_one(layout, self, self._layers, self.offset)

    def leave(self) -> None:
        """Take the state back into its own caches, up to ``offset``."""
        if self.place is not None:
            (group, row), self.place = self.place, None
            group.leave(row, self._layers, self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for the KV state."""
        if self.place is not None:
            return self.place[0].row_nbytes
        return sum(leaf.nbytes for leaf in flat(self._layers) if not leaf.empty())

    def evaluate(self) -> None:
        """Run whatever the layers' state still waits for."""
        mx.eval([leaf.state for leaf in flat(self.layers) if not leaf.empty()])


def state_size(cache: PromptCache) -> StateSize:
    """Return what state weighs, seen from a cache that holds at least one token."""
    windows, fixed_bytes = [], 0
    for leaf in split_leaves(cache.layers)[1]:
        if isinstance(leaf, RotatingKVCache) and not leaf.empty():
            windows.append((leaf.nbytes // leaf.keys.shape[-2], leaf.max_size))
        elif not leaf.empty():
            fixed_bytes += leaf.nbytes
    return StateSize(cache.buffer.row_nbytes, KVCache.step, tuple(windows), fixed_bytes)


@dataclass(frozen=True)
class LayerSnapshot:
    """The leaves that cannot be cut, as they are at one index.

    Attributes:
        leaves: mlx-lm caches. Copied before use, never run.
    """

    leaves: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves if not leaf.empty())


def take_snapshot(cache: PromptCache) -> LayerSnapshot:
    """Copy the leaves that cannot be cut, as they are now."""
    _, others = split_leaves(cache.layers)
    twins = tuple(_detached(leaf) for leaf in others)
    mx.eval([twin.state for twin in twins if not twin.empty()])
    return LayerSnapshot(twins)


def _detached(leaf: Any) -> Any:
    twin = copy.deepcopy(leaf)
    if leaf.empty():
        return twin
    if type(leaf) is RotatingKVCache and leaf.keep == 0:
        # After a span the ring holds up to a whole span more than the window needs.
        size = min(leaf.offset, leaf.max_size)
        twin.keys = leaf._temporal_order(leaf.keys)[..., -size:, :]
        twin.values = leaf._temporal_order(leaf.values)[..., -size:, :]
        twin._idx = size
    # A state array may be a view into the activations of the whole span.
    twin.state = tree_map(
        lambda value: mx.contiguous(value) if isinstance(value, mx.array) else value,
        twin.state,
    )
    return twin


def restore_cache(
    layers: list[Any],
    length: int,
    rows: Sequence[KVRows],
    snapshot: LayerSnapshot | None,
    *,
    room: int,
) -> PromptCache:
    """Copy stored state into fresh layers.

    Args:
        layers: The model's empty caches.
        length: Tokens to restore, at least 1.
        rows: Pieces whose lengths add up to ``length``, in order.
        snapshot: Taken at ``length``; None where no leaf needs one.
        room: Tokens that will follow; the buffers are made large enough for them.
    """
    assert sum(map(len, rows)) == length
    cuttable, others = split_leaves(layers)
    held = [(piece.buffer.arrays(), piece.start, piece.end) for piece in rows]
    for index, leaf in enumerate(cuttable):
        pieces = [
            [array[..., start:end, :] for array in arrays[index]]
            for arrays, start, end in held
        ]
        _fill(leaf, pieces, length, room)
    del held
    _restore_others(others, snapshot)
    cache = PromptCache(layers, length)
    cache.evaluate()
    return cache


def resume_cache(
    layers: list[Any], length: int, buffer: KVBuffer, snapshot: LayerSnapshot | None
) -> PromptCache:
    """Go on in a buffer that holds the state already; nothing of it is copied.

    Args:
        layers: The model's empty caches; the leaves that can be cut are replaced.
        length: Tokens whose state ``buffer`` holds; what lies behind is overwritten.
        buffer: Nobody else writes to it.
        snapshot: As for ``restore_cache``.
    """
    _, others = split_leaves(layers)
    _restore_others(others, snapshot)
    for leaf in buffer.leaves:
        leaf.offset = length
    cache = PromptCache(_with_leaves(layers, iter(buffer.leaves)), length, buffer)
    cache.evaluate()
    return cache


def _with_leaves(layers: Sequence[Any], leaves: Iterator[Any]) -> list[Any]:
    """Return ``layers`` with the leaves that can be cut taken from ``leaves``."""
    return [
        CacheList(*_with_leaves(layer.caches, leaves))
        if isinstance(layer, CacheList)
        else next(leaves)
        if _leaf_kind(layer) is CacheKind.TRIMMABLE
        else layer
        for layer in layers
    ]


def _restore_others(others: list[Any], snapshot: LayerSnapshot | None) -> None:
    stored = snapshot.leaves if snapshot else ()
    for leaf, twin in zip(others, stored, strict=True):
        leaf.__dict__.update(copy.deepcopy(twin).__dict__)


def _fill(leaf: Any, pieces: list[list[mx.array]], length: int, room: int) -> None:
    padding = -(length + room) % leaf.step + room
    arrays = []
    for parts in zip(*pieces, strict=True):
        shape = (*parts[0].shape[:-2], padding, parts[0].shape[-1])
        arrays.append(mx.concatenate([*parts, mx.zeros(shape, parts[0].dtype)], axis=-2))
    set_arrays(leaf, arrays)
    leaf.offset = length
