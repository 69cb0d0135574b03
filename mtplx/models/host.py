"""State between MLX and host memory, in the form that goes to disk.

Arrays become numpy's, with memory of their own; what numpy has no dtype for is viewed
as integers of its size. Everything else a cache keeps (offsets, window sizes) is JSON.
The way back fills fresh caches of the model, so that nothing in a file decides what
class is built. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mtplx.models.cache import (
    KVBuffer,
    KVRows,
    LayerSnapshot,
    set_arrays,
    split_leaves,
)
from mtplx.types import HostState

_INTEGERS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


def rows_to_host(views: Sequence[KVRows]) -> HostState:
    """Copy rows that follow one another into host memory."""
    arrays: dict[str, Any] = {}
    held = [(view.buffer.arrays(), view.start, view.end) for view in views]
    for index in range(len(held[0][0])):
        parts = [
            [array[..., start:end, :] for array in leaves[index]]
            for leaves, start, end in held
        ]
        for number, pieces in enumerate(zip(*parts, strict=True)):
            arrays[f"{index}.{number}"] = mx.concatenate(list(pieces), axis=-2)
    return _to_host(arrays, length=str(sum(map(len, views))))


def rows_from_host(state: HostState, layers: Sequence[Any]) -> KVRows:
    """Return the rows of ``state`` in a buffer of their own.

    Args:
        state: Of ``rows_to_host``.
        layers: Fresh caches of the same model.

    Raises:
        ValueError: The state is not of this model.
    """
    arrays = _from_host(state)
    cuttable, _ = split_leaves(layers)
    length = int(state.meta["length"])
    for index, leaf in enumerate(cuttable):
        mine = [arrays[name] for name in sorted(arrays) if name.split(".")[0] == str(index)]
        if not mine:
            raise ValueError("stored rows lack a layer of this model")
        set_arrays(leaf, mine)
        leaf.offset = length
    mx.eval(list(arrays.values()))
    return KVRows(KVBuffer(cuttable), 0, length)


def snapshot_to_host(snapshot: LayerSnapshot) -> HostState:
    """Copy a snapshot into host memory."""
    arrays: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for index, leaf in enumerate(snapshot.leaves):
        for path, value in tree_flatten(leaf.state):
            target = arrays if isinstance(value, mx.array) else values
            target[f"{index}.{path}"] = value
    return _to_host(arrays, values=json.dumps(values))


def snapshot_from_host(state: HostState, layers: Sequence[Any]) -> LayerSnapshot:
    """Return the snapshot of ``state``; arguments and errors as ``rows_from_host``."""
    arrays = _from_host(state)
    values: dict[str, Any] = {**json.loads(state.meta["values"]), **arrays}
    _, others = split_leaves(layers)
    for index, leaf in enumerate(others):
        mine = [
            (name.split(".", 1)[1], value)
            for name, value in values.items()
            if name.split(".", 1)[0] == str(index)
        ]
        if not mine:
            raise ValueError("a stored snapshot lacks a layer of this model")
        leaf.state = tree_unflatten(mine)
    mx.eval(list(arrays.values()))
    return LayerSnapshot(tuple(others))


def _to_host(arrays: dict[str, Any], **meta: str) -> HostState:
    mx.eval(list(arrays.values()))
    host, dtypes = {}, {}
    for name, array in arrays.items():
        dtypes[name] = str(array.dtype).removeprefix("mlx.core.")
        if array.dtype == mx.bfloat16:
            array = array.view(_INTEGERS[array.itemsize])
        host[name] = np.array(array)
    return HostState(host, {"dtypes": json.dumps(dtypes), **meta})


def _from_host(state: HostState) -> dict[str, mx.array]:
    dtypes = json.loads(state.meta["dtypes"])
    arrays = {}
    for name, array in state.arrays.items():
        dtype = getattr(mx, dtypes[name])
        value = mx.array(array)
        arrays[name] = value if value.dtype == dtype else value.view(dtype)
    return arrays
