"""What a model's KV cache holds, and how state is cut out of it and put back.

The caches themselves are mlx-lm's. This file decides which kind each layer has, takes
state out in the two forms the SessionBank stores (rows for layers that can be cut at
any token, snapshots for the others), and builds a cache from them. Whatever is taken
out is evaluated and has memory of its own, so that nobody's later write can reach it.
Runs on the thread that owns MLX.
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
    kinds = {_leaf_kind(leaf) for leaf in _leaves([layer_cache])}
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


def _leaves(layers: Sequence[Any]) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, CacheList):
            yield from _leaves(layer.caches)
        else:
            yield layer


def _split_leaves(layers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the leaves that can be cut, and the others."""
    leaves = list(_leaves(layers))
    cuttable = [leaf for leaf in leaves if _leaf_kind(leaf) is CacheKind.TRIMMABLE]
    others = [leaf for leaf in leaves if _leaf_kind(leaf) is not CacheKind.TRIMMABLE]
    return cuttable, others


class PromptCache:
    """The KV cache of one sequence, and what is needed to go on from it.

    Attributes:
        layers: One mlx-lm cache for each layer, as the model's forward takes them.
        offset: Tokens whose state is complete. It moves only once they are evaluated.
        logits: ``[vocab]``, after the last token; None while only prefilled.
        pending: A token that ``Model.decode`` has chosen and not yet read.
    """

    def __init__(self, layers: list[Any], offset: int = 0) -> None:
        self.layers = layers
        self.offset = offset
        self.logits: mx.array | None = None
        self.pending: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes allocated for the KV state."""
        return sum(leaf.nbytes for leaf in _leaves(self.layers) if not leaf.empty())

    def evaluate(self) -> None:
        """Run whatever the layers' state still waits for."""
        mx.eval([leaf.state for leaf in _leaves(self.layers) if not leaf.empty()])


@dataclass(frozen=True)
class KVRows:
    """Rows of a run of tokens, for every leaf that can be cut.

    Attributes:
        length: Tokens.
        leaves: For each leaf its arrays, keys then values, shape
            ``[1, heads, length, dim]``; a quantized leaf has three of each.
    """

    length: int
    leaves: tuple[tuple[mx.array, ...], ...]

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for leaf in self.leaves for array in leaf)

    def slice(self, start: int, end: int) -> KVRows:
        """Return a copy of rows ``[start, end)``."""
        return _copy_rows(self.leaves, start, end)


def _copy_rows(leaves: Sequence[Sequence[mx.array]], start: int, end: int) -> KVRows:
    rows = tuple(
        tuple(mx.contiguous(array[..., start:end, :]) for array in leaf) for leaf in leaves
    )
    mx.eval(rows)
    return KVRows(end - start, rows)


def copy_rows(cache: PromptCache, start: int, end: int) -> KVRows:
    """Copy rows ``[start, end)`` out of the leaves that can be cut."""
    assert end <= cache.offset
    cuttable, _ = _split_leaves(cache.layers)
    return _copy_rows([_arrays(leaf) for leaf in cuttable], start, end)


def _arrays(leaf: Any) -> tuple[mx.array, ...]:
    if type(leaf) is KVCache:
        return (leaf.keys, leaf.values)
    return (*leaf.keys, *leaf.values)


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
    _, others = _split_leaves(cache.layers)
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
    """Fill fresh layers with stored state.

    Args:
        layers: The model's empty caches.
        length: Tokens to restore, at least 1.
        rows: Pieces whose lengths add up to ``length``, in order.
        snapshot: Taken at ``length``; None where no leaf needs one.
        room: Tokens that will follow; the buffers are made large enough for them.
    """
    assert sum(map(len, rows)) == length
    cuttable, others = _split_leaves(layers)
    for index, leaf in enumerate(cuttable):
        _fill(leaf, [piece.leaves[index] for piece in rows], length, room)
    stored = snapshot.leaves if snapshot else ()
    for leaf, twin in zip(others, stored, strict=True):
        leaf.__dict__.update(copy.deepcopy(twin).__dict__)
    cache = PromptCache(layers, length)
    cache.evaluate()
    return cache


def _fill(leaf: Any, pieces: list[tuple[mx.array, ...]], length: int, room: int) -> None:
    padding = -(length + room) % leaf.step + room
    arrays = []
    for parts in zip(*pieces, strict=True):
        shape = (*parts[0].shape[:-2], padding, parts[0].shape[-1])
        arrays.append(mx.concatenate([*parts, mx.zeros(shape, parts[0].dtype)], axis=-2))
    if type(leaf) is KVCache:
        leaf.keys, leaf.values = arrays
    else:
        leaf.keys, leaf.values = arrays[:3], arrays[3:]
    leaf.offset = length
