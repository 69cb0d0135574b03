"""Attention on the CPU, and the hook through which a network's own calls reach it.

MLX's CPU backend takes exponentials one by one, about 20 ns each, and computes the whole
square of scores for a causal mask; together that is most of what a prefill costs there.
``attend`` computes blocks of queries that fit the cache, each against the keys that it
can see, with an exponential made of operations that MLX does vectorise. Measured on two
x86 cores with 9 heads of 64 (``benchmarks/cpu_attention.py``): 1.9 times as fast for 24
queries at depth 450, 2.0 times for 512 at depth 0, 1.6 times for 512 at depth 4000.

Elsewhere (a GPU, other types, masks, sinks, quantized keys) MLX's attention is called.
Nothing of mlx-lm stays changed after a forward. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base

_NAME = "scaled_dot_product_attention"

BLOCK_SCORES = 256 * 1024
"""Scores of one block, over all heads: 1 MiB of float32, so that the passes over them
stay in a core's cache."""

_MIN_ROWS, _MAX_ROWS = 16, 64

_MIN_SCORES = 8 * 1024
"""Below this the dozen small operations of a block cost more than they save."""

_EXP2 = (0.0018775767, 0.0089893397, 0.055826318, 0.24015361, 0.69315308, 0.99999994)
"""Polynomial for 2**x on [0, 1), highest power first; relative error below 3e-7. From
the usual minimax fit of degree 5."""


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute attention, as mlx-lm's function of the same arguments does.

    Args:
        queries: ``[1, heads, length, dim]``.
        keys, values: ``[1, kv_heads, depth + length, dim]``.
        cache: The layer's cache; only asked whether it is quantized.
        scale: Of the scores.
        mask: None, ``"causal"``, or an array.
        sinks: Extra scores, one for each head.
    """
    fast = (
        mx.default_device() == mx.cpu
        and sinks is None
        and not hasattr(cache, "bits")
        and queries.dtype == mx.float32
        and queries.shape[0] == 1
        and queries.shape[1] * queries.shape[2] * keys.shape[2] >= _MIN_SCORES
        and (mask is None or (isinstance(mask, str) and mask == "causal"))
    )
    if not fast:
        return base.scaled_dot_product_attention(
            queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
        )
    return _blockwise(queries * scale, keys, values, causal=mask is not None)


def _blockwise(
    queries: mx.array, keys: mx.array, values: mx.array, *, causal: bool
) -> mx.array:
    _, heads, length, dim = queries.shape
    kv_heads, total = keys.shape[1:3]
    grouped = queries.reshape(1, kv_heads, heads // kv_heads, length, dim)
    rows = min(max(BLOCK_SCORES // (heads * total), _MIN_ROWS), _MAX_ROWS)
    depth = total - length
    blocks = []
    for start in range(0, length, rows):
        end = min(start + rows, length)
        seen = depth + end if causal else total
        # The last of the queries that share their keys sees all of these.
        alone = end - start == 1
        bias = None if alone or not causal else _causal_bias(depth + start, seen)
        part = grouped[..., start:end, :]
        blocks.append(_block(part, keys[:, :, :seen], values[:, :, :seen], bias))
    joined = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=3)
    return joined.reshape(1, heads, length, values.shape[-1])


def _block(
    queries: mx.array, keys: mx.array, values: mx.array, bias: mx.array | None
) -> mx.array:
    """Attend with ``[1, kv_heads, group, rows, dim]`` queries to all of ``keys``."""
    _, kv_heads, group, rows, dim = queries.shape
    flat = queries.reshape(1, kv_heads, group * rows, dim)
    scores = flat @ keys.swapaxes(-1, -2)
    if bias is not None:
        scores = scores.reshape(1, kv_heads, group, rows, -1) + bias
        scores = scores.reshape(1, kv_heads, group * rows, -1)
    fraction, power = _exp_parts(scores, mx.max(scores, axis=-1, keepdims=True))
    weights = fraction * power.view(mx.float32)
    out = (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)
    return out.reshape(1, kv_heads, group, rows, values.shape[-1])


def _causal_bias(start: int, end: int) -> mx.array:
    """Return ``[end - start, end]``: 0 where a query may look, else minus infinity."""
    visible = mx.arange(start, end)[:, None] >= mx.arange(end)[None]
    return mx.where(visible, 0.0, -math.inf)


@partial(mx.compile, shapeless=True)
def _exp_parts(scores: mx.array, highest: mx.array) -> tuple[mx.array, mx.array]:
    """Return ``exp(scores - highest)`` as a factor in [1, 2) and the bits of a power of 2.

    ``exp(x) = 2**i * 2**f`` with ``i + f = x / ln 2``; a float32 with exponent bits
    ``i + 127`` and nothing else is ``2**i``. What underflows becomes 2**-126.
    """
    exponent = mx.maximum((scores - highest) * math.log2(math.e), -126.0)
    whole = mx.floor(exponent)
    rest = exponent - whole
    factor = rest * _EXP2[0] + _EXP2[1]
    for coefficient in _EXP2[2:]:
        factor = factor * rest + coefficient
    return factor, (whole * 2.0**23 + 127 * 2.0**23).astype(mx.int32)


# -- the hook -------------------------------------------------------------------


def attention_modules(network: nn.Module) -> list[ModuleType]:
    """Return the Python modules where this network looks up mlx-lm's attention."""
    modules = {sys.modules[type(module).__module__] for module in network.modules()}
    original = base.scaled_dot_product_attention
    return [module for module in modules if getattr(module, _NAME, None) is original]


@contextmanager
def attention_replaced(
    modules: Sequence[ModuleType], function: Callable[..., mx.array]
) -> Iterator[None]:
    """Make the networks of these modules call ``function`` inside the block."""
    for module in modules:
        setattr(module, _NAME, function)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _NAME, base.scaled_dot_product_attention)
