"""Two functions that MLX's CPU backend is slow at, and the hook through which a network's
own calls reach them.

That backend takes exponentials one by one, about 20 ns each, and computes the whole
square of scores for a causal mask; together that is most of what a prefill costs there.
``attend`` computes blocks of queries that fit the cache, each against the keys that it
can see, and ``swiglu`` the gate of a dense layer, both with an exponential made of
operations that MLX does vectorise. Measured on two x86 cores with the shapes of a 135M
model (``benchmarks/cpu_functions.py``): attention 1.9 times as fast for 24 queries at
depth 450, 2.0 times for 512 at depth 0, 1.6 times for 512 at depth 4000; swiglu 3.3 times.

Elsewhere (a GPU, other types, masks, sinks, quantized keys) mlx-lm's functions are
called. Nothing of mlx-lm stays changed after a forward. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import activations, base

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
        queries: ``[rows, heads, length, dim]``.
        keys, values: ``[rows, kv_heads, depth + length, dim]``.
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
        and _is_worth_it(queries, keys, mask)
    )
    if not fast:
        return base.scaled_dot_product_attention(
            queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
        )
    if queries.shape[2] == 1:
        return _one_token(queries * scale, keys, values, mask)
    return _blockwise(queries * scale, keys, values, causal=mask is not None)


def _is_worth_it(queries: mx.array, keys: mx.array, mask: Any) -> bool:
    """Say whether a mask is of a kind that is computed here, and that saves time.

    Streams in a group, which have a mask of their own, are computed here whatever their
    number and length: forwards of theirs are traced, and these choices would be kernels
    that are compiled in the middle of a stream.
    """
    if isinstance(mask, mx.array):
        return queries.shape[2] == 1 and mask.dtype == mx.bool_ and mask.ndim == 4
    scores = queries.shape[1] * queries.shape[2] * keys.shape[2]
    plain = queries.shape[0] == 1 and mask in (None, "causal")
    return plain and scores >= _MIN_SCORES


def _one_token(queries: mx.array, keys: mx.array, values: mx.array, mask: Any) -> mx.array:
    """Attend with one token for each row, which sees all that ``mask`` (if an array,
    ``[rows, 1, 1, length]``) lets it see."""
    rows, heads, _, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(rows, kv_heads, heads // kv_heads, dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -math.inf)
    return _weighted(scores, values).reshape(rows, heads, 1, values.shape[-1])


def _weighted(scores: mx.array, values: mx.array) -> mx.array:
    """Return the values, averaged with the softmax of the scores as weights."""
    factor, power = _exp_parts(scores, mx.max(scores, axis=-1, keepdims=True))
    weights = factor * power.view(mx.float32)
    return (weights @ values) / mx.sum(weights, axis=-1, keepdims=True)


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
    return _weighted(scores, values).reshape(1, kv_heads, group, rows, values.shape[-1])


def _causal_bias(start: int, end: int) -> mx.array:
    """Return ``[end - start, end]``: 0 where a query may look, else minus infinity."""
    visible = mx.arange(start, end)[:, None] >= mx.arange(end)[None]
    return mx.where(visible, 0.0, -math.inf)


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """Return ``x`` gated: ``gate / (1 + exp(-gate)) * x``, as mlx-lm's function does."""
    if mx.default_device() != mx.cpu or gate.dtype != mx.float32 or x.dtype != mx.float32:
        return activations.swiglu(gate, x)
    factor, power = _exp_parts(-gate, mx.zeros(()))
    return _gated(gate, x, factor, power.view(mx.float32))


@partial(mx.compile, shapeless=True)
def _gated(gate: mx.array, x: mx.array, factor: mx.array, power: mx.array) -> mx.array:
    return gate * x / (1.0 + factor * power)


@partial(mx.compile, shapeless=True)
def _exp_parts(scores: mx.array, highest: mx.array) -> tuple[mx.array, mx.array]:
    """Return ``exp(scores - highest)`` as a factor in [1, 2) and the bits of a power of 2.

    ``exp(x) = 2**i * 2**f`` with ``i + f = x / ln 2``; a float32 with exponent bits
    ``i + 127`` and nothing else is ``2**i``. What lies outside a float32's range becomes
    2**-126 or 2**126.
    """
    exponent = mx.clip((scores - highest) * math.log2(math.e), -126.0, 126.0)
    whole = mx.floor(exponent)
    rest = exponent - whole
    factor = rest * _EXP2[0] + _EXP2[1]
    for coefficient in _EXP2[2:]:
        factor = factor * rest + coefficient
    return factor, (whole * 2.0**23 + 127 * 2.0**23).astype(mx.int32)


# -- the hook -------------------------------------------------------------------

_ATTENTION, _SWIGLU = "scaled_dot_product_attention", "swiglu"
_ORIGINALS = {
    _ATTENTION: base.scaled_dot_product_attention,
    _SWIGLU: activations.swiglu,
}


class Hooks:
    """Where a network looks up the functions of mlx-lm that can be replaced.

    Args:
        network: Only the Python modules that it is made of are touched.
    """

    def __init__(self, network: nn.Module) -> None:
        modules = {sys.modules[type(module).__module__] for module in network.modules()}
        self._modules = {
            name: [module for module in modules if getattr(module, name, None) is original]
            for name, original in _ORIGINALS.items()
        }

    def attention(self, function: Callable[..., mx.array]) -> AbstractContextManager[None]:
        """Make the network call ``function`` for attention inside the block."""
        return self._replaced(_ATTENTION, function)

    def swiglu(self, function: Callable[..., mx.array]) -> AbstractContextManager[None]:
        """Make the network call ``function`` for the gate inside the block."""
        return self._replaced(_SWIGLU, function)

    @contextmanager
    def _replaced(self, name: str, function: Callable[..., mx.array]) -> Iterator[None]:
        for module in self._modules[name]:
            setattr(module, name, function)
        try:
            yield
        finally:
            for module in self._modules[name]:
                setattr(module, name, _ORIGINALS[name])
