"""Lets one forward read tokens of several requests, each with its own caches.

Every row of the batch is one token. Most requests have one row; the span of a prompt
may come along with a row for each of its tokens. For the time of one forward a layer's
caches are replaced by one stand-in, of one of two kinds:

* keys and values: ``RowCaches`` writes the rows of each request into its own mlx-lm
  cache and answers with an opaque handle; attention, hooked where the network's modules
  look it up, takes the handle apart and runs once per request. Nothing is padded or
  moved.
* recurrent state: it has one size for all, so the states are joined into one cache for
  this forward and given back after it.

A layer that computes on the keys itself, as latent attention does, cannot work with a
handle. Its mixer (the module that takes the cache) is then called once per request,
and only what surrounds it is shared. Which way suits a network is decided in
``batch.py``. Hooks exist only inside ``one_call_per_row``; nothing of mlx-lm stays
changed. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from mtplx.models.cpu import Hooks, attend, swiglu


class PerRequest:
    """A handle: one value for each request, which the network only passes on.

    Args:
        values: In the order of the requests.
        layer: Knows which rows are whose.
    """

    def __init__(self, values: list[Any], layer: RowCaches) -> None:
        self.values = values
        self.layer = layer


class RowCaches:
    """Stands for the caches that several requests have for one layer.

    Args:
        caches: One mlx-lm cache per request; these do all the work.
        counts: Rows of each request.
        offsets: ``[rows]`` int32, the position of each row: for the rotary embedding.
    """

    def __init__(self, caches: list[Any], counts: Sequence[int], offsets: mx.array) -> None:
        self.caches = caches
        self.counts = counts
        self.offset = offsets
        self._cuts = list(accumulate(counts[:-1]))

    def make_mask(self, length: int, *args: Any, **kwargs: Any) -> PerRequest | None:
        """Return a handle to each cache's own mask, or None if none has one."""
        assert length == 1, "every row is one token"
        masks = [
            cache.make_mask(count, *args, **kwargs)
            for cache, count in zip(self.caches, self.counts, strict=True)
        ]
        return None if all(mask is None for mask in masks) else PerRequest(masks, self)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[PerRequest, PerRequest]:
        """Write each request's rows, ``[rows, heads, 1, dim]``, into its own cache."""
        parts = zip(self.caches, self.part(keys), self.part(values), strict=True)
        fetched = [cache.update_and_fetch(key, value) for cache, key, value in parts]
        self.offset = self.offset + 1
        return self._handles(fetched)

    def keys_and_values(self) -> tuple[PerRequest, PerRequest]:
        """Return handles for a layer that attends to another layer's keys."""
        return self._handles([cache.keys_and_values() for cache in self.caches])

    def _handles(self, fetched: list[tuple[Any, Any]]) -> tuple[PerRequest, PerRequest]:
        keys, values = ([pair[side] for pair in fetched] for side in (0, 1))
        return PerRequest(keys, self), PerRequest(values, self)

    def part(self, rows: mx.array) -> list[mx.array]:
        """Turn ``[rows, heads, 1, dim]`` into ``[1, heads, count, dim]`` per request."""
        parts = cast(list[mx.array], mx.split(rows, self._cuts))
        return [
            part if count == 1 else part.swapaxes(0, 2)
            for part, count in zip(parts, self.counts, strict=True)
        ]

    def join(self, parts: list[mx.array]) -> mx.array:
        """Undo ``part``."""
        return mx.concatenate(
            [
                part if count == 1 else part.swapaxes(0, 2)
                for part, count in zip(parts, self.counts, strict=True)
            ]
        )


def _split(array: mx.array) -> list[mx.array]:
    return cast(list[mx.array], mx.split(array, array.shape[0]))


class PackedLayers:
    """The stand-ins for all layers, for one forward.

    Args:
        requests: For each request its caches, one for each layer.
        counts: Rows of each; more than one only where ``takes_spans`` is true of them.
        merge: Join keys and values too, with mlx-lm's padded batch caches.

    Attributes:
        layers: What the forward takes.
        leaves: The requests' own caches that it will write to.
    """

    def __init__(
        self, requests: Sequence[Sequence[Any]], counts: Sequence[int], *, merge: bool
    ) -> None:
        self._counts = counts
        self._merge = merge
        self._offsets: dict[tuple[int, ...], mx.array] = {}
        self._joined: list[tuple[list[Any], Any]] = []
        self.leaves: list[Any] = []
        self.layers = [self._pack(list(rows)) for rows in zip(*requests, strict=True)]

    def _pack(self, rows: list[Any]) -> Any:
        if isinstance(rows[0], CacheList):
            parts = zip(*(row.caches for row in rows), strict=True)
            return CacheList(*(self._pack(list(part)) for part in parts))
        self.leaves += rows
        if isinstance(rows[0], ArraysCache):
            stand_in = _join_states(rows)
        elif self._merge:
            stand_in = type(rows[0]).merge(rows)
        else:
            offsets = tuple(row.offset for row in rows)
            if offsets not in self._offsets:
                self._offsets[offsets] = _positions(offsets, self._counts)
            return RowCaches(rows, self._counts, self._offsets[offsets])
        self._joined.append((rows, stand_in))
        return stand_in

    def give_back(self) -> None:
        """Put joined state back into the requests' own caches, in memory of its own."""
        for rows, stand_in in self._joined:
            if isinstance(stand_in, ArraysCache):
                _part_states(stand_in, rows)
            else:
                for index, row in enumerate(rows):
                    row.__dict__.update(stand_in.extract(index).__dict__)


def takes_spans(layers: Sequence[Any]) -> bool:
    """Return whether a request with these caches may have several rows.

    Recurrent state cannot: its rows would be read as requests of their own.
    """
    return all(
        takes_spans(layer.caches)
        if isinstance(layer, CacheList)
        else not isinstance(layer, ArraysCache)
        for layer in layers
    )


def _positions(offsets: Sequence[int], counts: Sequence[int]) -> mx.array:
    positions: list[int] = []
    for offset, count in zip(offsets, counts, strict=True):
        positions += range(offset, offset + count)
    return mx.array(positions, mx.int32)


def _join_states(rows: list[Any]) -> Any:
    joined = type(rows[0])(len(rows[0].cache))
    for slot in range(len(joined.cache)):
        states = [row[slot] for row in rows]
        if any(state is not None for state in states):
            joined[slot] = mx.concatenate(states)
    return joined


def _part_states(joined: Any, rows: list[Any]) -> None:
    for slot, state in enumerate(joined.cache):
        if state is not None:
            for row, part in zip(rows, _split(state), strict=True):
                # A bare part would keep the state of every row in memory.
                row[slot] = mx.contiguous(part)


# -- hooks ----------------------------------------------------------------------


def mixers(network: nn.Module) -> list[nn.Module]:
    """Return the outermost modules inside the network's layers that take a cache."""
    layers = getattr(network, "layers", ())
    return [mixer for layer in layers for mixer in _mixers_below(layer)]


def _mixers_below(module: Any) -> Iterator[nn.Module]:
    # Exact: a module is a dict too.
    if isinstance(module, list | tuple) or type(module) is dict:
        children = module.values() if isinstance(module, dict) else module
    else:
        children = module.children().values()
    for child in children:
        if isinstance(child, nn.Module) and _takes_cache(child):
            yield child
        else:
            yield from _mixers_below(child)


def _takes_cache(module: nn.Module) -> bool:
    return "cache" in inspect.signature(type(module).__call__).parameters


def final_norm(network: nn.Module) -> nn.Module | None:
    """Return the norm before the output layer, where the network is built the usual way."""
    norm = getattr(getattr(network, "model", None), "norm", None)
    return norm if isinstance(norm, nn.Module) else None


@contextmanager
def only_rows(norm: nn.Module, kept: slice | list[slice]) -> Iterator[None]:
    """Make the final norm drop all rows but these, so that the output layer, a quarter
    of a small model, runs for them only."""
    kind = type(norm)
    wanted = kept if isinstance(kept, list) else [kept]

    def call(self: nn.Module, hidden: mx.array) -> mx.array:
        rows = mx.concatenate([hidden[part] for part in wanted])
        return cast(mx.array, kind.__call__(self, rows))

    norm.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield
    finally:
        norm.__class__ = kind


@contextmanager
def one_call_per_row(hooks: Hooks, split: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Make handles work inside the block.

    Args:
        hooks: Of the network.
        split: Mixers that are called once per row instead.
    """
    kinds = [type(mixer) for mixer in split]
    with hooks.attention(_attention), hooks.swiglu(swiglu):
        try:
            for mixer, kind in zip(split, kinds, strict=True):
                mixer.__class__ = _by_row(cast(Hashable, kind))
            yield
        finally:
            for mixer, kind in zip(split, kinds, strict=True):
                mixer.__class__ = kind


def _attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    if not isinstance(keys, PerRequest):
        return attend(queries, keys, values, cache, scale, mask, sinks)
    if mask is not None and not isinstance(mask, PerRequest):
        raise TypeError("the network computes a mask of its own")
    nothing = [None] * len(keys.values)
    masks = nothing if mask is None else mask.values
    # A layer that attends to another layer's keys may have no cache.
    caches = nothing if cache is None else cache.caches
    layer = keys.layer
    parts = zip(layer.part(queries), keys.values, values.values, strict=True)
    return layer.join(
        [
            attend(query, key, value, own_cache, scale, own_mask, sinks)
            for (query, key, value), own_cache, own_mask in zip(
                parts, caches, masks, strict=True
            )
        ]
    )


@functools.cache
def _by_row(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose call runs once per row, each with its own cache."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        count = max(map(_row_count, (*args, *kwargs.values())))
        if not count:
            return kind.__call__(self, *args, **kwargs)
        outputs = [
            kind.__call__(
                self,
                *(_row(value, index, count) for value in args),
                **{name: _row(value, index, count) for name, value in kwargs.items()},
            )
            for index in range(count)
        ]
        return _join_outputs(outputs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _row_count(value: Any) -> int:
    if isinstance(value, RowCaches):
        return len(value.caches)
    if isinstance(value, CacheList):
        return max(map(_row_count, value.caches))
    return 0


def _row(value: Any, index: int, count: int) -> Any:
    if isinstance(value, RowCaches):
        return value.caches[index]
    if isinstance(value, PerRequest):
        return value.values[index]
    if isinstance(value, CacheList):
        return CacheList(*(_row(part, index, count) for part in value.caches))
    if isinstance(value, mx.array) and value.shape[:1] == (count,):
        return value[index : index + 1]
    return value


def _join_outputs(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join_outputs(list(part)) for part in zip(*outputs, strict=True))
    return None if outputs[0] is None else mx.concatenate(outputs)
