"""Lets one forward read a token for each of several requests, each with its own caches.

The rows of the batch are the requests. For the time of one forward a layer's caches
are replaced by one stand-in, of one of two kinds:

* keys and values: ``RowCaches`` writes each row into its request's own mlx-lm cache and
  answers with an opaque handle; attention, hooked where the network's modules look it
  up, takes the handle apart and runs once per request. Nothing is padded or moved.
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
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList

_ATTENTION = "scaled_dot_product_attention"


class PerRow:
    """A handle: one value for each row, which the network only passes on."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class RowCaches:
    """Stands for the caches that several requests have for one layer.

    Args:
        caches: One mlx-lm cache per row; these do all the work.
        offsets: ``[rows]`` int32, tokens in each: positions for the rotary embedding.
    """

    def __init__(self, caches: list[Any], offsets: mx.array) -> None:
        self.caches = caches
        self.offset = offsets

    def make_mask(self, *args: Any, **kwargs: Any) -> PerRow | None:
        """Return a handle to each cache's own mask, or None if none has one."""
        masks = [cache.make_mask(*args, **kwargs) for cache in self.caches]
        return None if all(mask is None for mask in masks) else PerRow(masks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerRow, PerRow]:
        """Write each row, ``[heads, 1, dim]``, into its own cache."""
        parts = zip(self.caches, _split(keys), _split(values), strict=True)
        fetched = [cache.update_and_fetch(key, value) for cache, key, value in parts]
        self.offset = self.offset + 1
        return _handles(fetched)

    def keys_and_values(self) -> tuple[PerRow, PerRow]:
        """Return handles for a layer that attends to another layer's keys."""
        return _handles([cache.keys_and_values() for cache in self.caches])


def _handles(fetched: list[tuple[Any, Any]]) -> tuple[PerRow, PerRow]:
    return PerRow([keys for keys, _ in fetched]), PerRow([values for _, values in fetched])


def _split(array: mx.array) -> list[mx.array]:
    return cast(list[mx.array], mx.split(array, array.shape[0]))


class PackedLayers:
    """The stand-ins for all layers, for one forward.

    Args:
        requests: For each row its request's caches, one for each layer.
        merge: Join keys and values too, with mlx-lm's padded batch caches.

    Attributes:
        layers: What the forward takes.
        leaves: The requests' own caches that it will write to.
    """

    def __init__(self, requests: Sequence[Sequence[Any]], *, merge: bool) -> None:
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
                self._offsets[offsets] = mx.array(offsets, mx.int32)
            return RowCaches(rows, self._offsets[offsets])
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


def attention_modules(network: nn.Module) -> list[ModuleType]:
    """Return the Python modules where this network looks up mlx-lm's attention."""
    modules = {sys.modules[type(module).__module__] for module in network.modules()}
    original = base.scaled_dot_product_attention
    return [module for module in modules if getattr(module, _ATTENTION, None) is original]


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


@contextmanager
def one_call_per_row(
    modules: Sequence[ModuleType], split: Sequence[nn.Module] = ()
) -> Iterator[None]:
    """Make handles work inside the block.

    Args:
        modules: Where attention is hooked.
        split: Mixers that are called once per row instead.
    """
    kinds = [type(mixer) for mixer in split]
    try:
        for module in modules:
            setattr(module, _ATTENTION, _attention)
        for mixer, kind in zip(split, kinds, strict=True):
            mixer.__class__ = _by_row(cast(Hashable, kind))
        yield
    finally:
        for module in modules:
            setattr(module, _ATTENTION, base.scaled_dot_product_attention)
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
    original = base.scaled_dot_product_attention
    if not isinstance(keys, PerRow):
        return original(queries, keys, values, cache, scale, mask, sinks)
    if mask is not None and not isinstance(mask, PerRow):
        raise TypeError("the network computes a mask of its own")
    nothing = [None] * len(keys.rows)
    masks = nothing if mask is None else mask.rows
    # A layer that attends to another layer's keys may have no cache.
    caches = nothing if cache is None else cache.caches
    rows = zip(_split(queries), keys.rows, values.rows, caches, masks, strict=True)
    return mx.concatenate(
        [original(*row[:4], scale=scale, mask=row[4], sinks=sinks) for row in rows]
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
    if isinstance(value, PerRow):
        return value.rows[index]
    if isinstance(value, CacheList):
        return CacheList(*(_row(part, index, count) for part in value.caches))
    if isinstance(value, mx.array) and value.shape[:1] == (count,):
        return value[index : index + 1]
    return value


def _join_outputs(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join_outputs(list(part)) for part in zip(*outputs, strict=True))
    return None if outputs[0] is None else mx.concatenate(outputs)
