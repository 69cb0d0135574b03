"""Lets one forward read tokens of several parts, each with caches of its own.

Every row of the batch is one token. A part is a group of streams (``group.py``), with a
row for each of them, or one sequence with caches of its own: the span of a prompt, with
a row for each of its tokens, or a stream that no group can hold. For the time of one
forward a layer's caches are replaced by one stand-in, of one of two kinds:

* keys and values: ``PartCaches`` hands the rows of each part to the part's own cache
  and answers with an opaque handle; attention, hooked where the network's modules look
  it up, takes the handle apart and runs once per part. Nothing is padded or moved.
* recurrent state: it has one size for all, so the states are joined into one cache for
  this forward and given back after it.

A layer that computes on the keys itself, as latent attention does, cannot work with a
handle. Its mixer (the module that takes the cache) is then called once per part, and
only what surrounds it is shared. Which way suits a network is decided in ``batch.py``.
Hooks exist only inside ``one_call_per_part``; nothing of mlx-lm stays changed. Runs on
the thread that owns MLX.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList

from mtplx.models.cpu import Hooks, attend, swiglu
from mtplx.models.layout import flat


@dataclass(frozen=True)
class Part:
    """Rows of a forward that share caches.

    Attributes:
        layers: Caches, one for each layer.
        rows: How many.
        is_span: They are one sequence's, in order; else each row is a stream.
    """

    layers: Sequence[Any]
    rows: int
    is_span: bool


class PerPart:
    """A handle: one value for each part, which the network only passes on.

    Args:
        values: In the order of the parts.
        layer: Knows which rows are whose.
    """

    def __init__(self, values: list[Any], layer: PartCaches) -> None:
        self.values = values
        self.layer = layer


class PartCaches:
    """Stands for the caches that several parts have for one layer.

    Args:
        caches: One cache for each part; these do all the work.
        parts: The parts.
        offsets: ``[rows]`` int32, the position of each row: for the rotary embedding.
    """

    def __init__(self, caches: list[Any], parts: Sequence[Part], offsets: mx.array) -> None:
        self.caches = caches
        self.parts = parts
        self.offset = offsets
        self._cuts = _cuts(parts)

    def make_mask(self, length: int, *args: Any, **kwargs: Any) -> PerPart | None:
        """Return a handle to each cache's own mask, or None if none has one."""
        assert length == 1, "every row is one token"
        masks = [
            cache.make_mask(part.rows if part.is_span else 1, *args, **kwargs)
            for cache, part in zip(self.caches, self.parts, strict=True)
        ]
        return None if all(mask is None for mask in masks) else PerPart(masks, self)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[PerPart, PerPart]:
        """Write each part's rows, ``[rows, heads, 1, dim]``, into its own cache."""
        parted = zip(self.caches, self.part(keys), self.part(values), strict=True)
        fetched = [cache.update_and_fetch(key, value) for cache, key, value in parted]
        self.offset = self.offset + 1
        return self._handles(fetched)

    def keys_and_values(self) -> tuple[PerPart, PerPart]:
        """Return handles for a layer that attends to another layer's keys."""
        return self._handles([cache.keys_and_values() for cache in self.caches])

    def _handles(self, fetched: list[tuple[Any, Any]]) -> tuple[PerPart, PerPart]:
        keys, values = ([pair[side] for pair in fetched] for side in (0, 1))
        return PerPart(keys, self), PerPart(values, self)

    def part(self, rows: mx.array) -> list[mx.array]:
        """Turn ``[rows, heads, 1, dim]`` into ``[rows, heads, 1, dim]`` for each group,
        and ``[1, heads, rows, dim]`` for each span."""
        return [
            piece.swapaxes(0, 2) if part.is_span else piece
            for piece, part in zip(mx.split(rows, self._cuts), self.parts, strict=True)
        ]

    def join(self, pieces: list[mx.array]) -> mx.array:
        """Undo ``part``."""
        return mx.concatenate(
            [
                piece.swapaxes(0, 2) if part.is_span else piece
                for piece, part in zip(pieces, self.parts, strict=True)
            ]
        )


class PackedLayers:
    """The stand-ins for all layers, for one forward.

    Args:
        parts: A span of several rows only where ``takes_spans`` is true of its caches.
        offsets: ``[rows]`` int32, the position of each row.

    Attributes:
        layers: What the forward takes.
    """

    def __init__(self, parts: Sequence[Part], offsets: mx.array) -> None:
        self._parts = parts
        self._offsets = offsets
        self._joined: list[tuple[list[Any], Any]] = []
        trees = zip(*(part.layers for part in parts), strict=True)
        self.layers = [self._pack([*caches]) for caches in trees]

    def _pack(self, caches: list[Any]) -> Any:
        if isinstance(caches[0], CacheList):
            inner = zip(*(each.caches for each in caches), strict=True)
            return CacheList(*(self._pack([*part]) for part in inner))
        if not isinstance(caches[0], ArraysCache):
            return PartCaches(caches, self._parts, self._offsets)
        joined = _join_states(caches)
        self._joined.append((caches, joined))
        return joined

    def give_back(self) -> None:
        """Put joined state back into the parts' own caches."""
        for caches, joined in self._joined:
            for slot, state in enumerate(joined.cache):
                if state is None:
                    continue
                pieces = mx.split(state, _cuts(self._parts))
                for cache, piece in zip(caches, pieces, strict=True):
                    # A bare part would keep the state of every row in memory.
                    cache[slot] = mx.contiguous(piece)


def takes_spans(layers: Sequence[Any]) -> bool:
    """Return whether a sequence with these caches may have several rows.

    Recurrent state cannot: its rows would be read as sequences of their own.
    """
    return not any(isinstance(cache, ArraysCache) for cache in flat(layers))


def _cuts(parts: Sequence[Part]) -> list[int]:
    return [*accumulate(part.rows for part in parts[:-1])]


def _join_states(caches: list[Any]) -> Any:
    joined = type(caches[0])(len(caches[0].cache))
    for slot in range(len(joined.cache)):
        states = [cache[slot] for cache in caches]
        if any(state is not None for state in states):
            joined[slot] = mx.concatenate(states)
    return joined


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
def one_call_per_part(hooks: Hooks, split: Sequence[nn.Module] = ()) -> Iterator[None]:
    """Make handles work inside the block.

    Args:
        hooks: Of the network.
        split: Mixers that are called once per part instead.
    """
    kinds = [type(mixer) for mixer in split]
    with hooks.attention(_attention), hooks.swiglu(swiglu):
        try:
            for mixer, kind in zip(split, kinds, strict=True):
                mixer.__class__ = _by_part(cast(Hashable, kind))
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
    if not isinstance(keys, PerPart):
        return attend(queries, keys, values, cache, scale, mask, sinks)
    if mask is not None and not isinstance(mask, PerPart):
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
def _by_part(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose call runs once per part, each with its own cache."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parts = next(filter(None, map(_parts, (*args, *kwargs.values()))), None)
        if parts is None:
            return kind.__call__(self, *args, **kwargs)
        ends = [*accumulate(part.rows for part in parts)]
        outputs = []
        for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
            rows = slice(end - part.rows, end)
            outputs.append(
                kind.__call__(
                    self,
                    *(_of_part(value, index, rows, ends[-1]) for value in args),
                    **{
                        name: _of_part(value, index, rows, ends[-1])
                        for name, value in kwargs.items()
                    },
                )
            )
        return _join_outputs(outputs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _parts(value: Any) -> Sequence[Part] | None:
    if isinstance(value, PartCaches):
        return value.parts
    if isinstance(value, CacheList):
        return next(filter(None, map(_parts, value.caches)), None)
    return None


def _of_part(value: Any, index: int, rows: slice, count: int) -> Any:
    if isinstance(value, PartCaches):
        return value.caches[index]
    if isinstance(value, PerPart):
        return value.values[index]
    if isinstance(value, CacheList):
        return CacheList(*(_of_part(part, index, rows, count) for part in value.caches))
    if isinstance(value, mx.array) and value.shape[:1] == (count,):
        return value[rows]
    return value


def _join_outputs(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join_outputs(list(part)) for part in zip(*outputs, strict=True))
    return None if outputs[0] is None else mx.concatenate(outputs)
