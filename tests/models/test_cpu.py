"""Attention and swiglu on the CPU = mlx-lm's, and the hook leaves nothing behind."""

from __future__ import annotations

import math
import sys

import mlx.core as mx
import pytest
from mlx_lm.models import activations, base, gemma3_text, gpt_oss, llama
from mlx_lm.models.cache import QuantizedKVCache

from mtplx.models import cpu
from mtplx.models.cpu import Hooks, attend, swiglu
from mtplx.models.model import Model
from tests.tiny_models import CONFIGS, make_network, prompt_ids, tiny_model

TOLERANCE = 1e-5

HEADS = {
    "one": (1, 1),
    "each its own": (4, 4),
    "groups": (8, 2),
    "all one": (6, 1),
    "odd": (9, 3),
}
SIZES = {
    "one query": (1, 2500),
    "one query and no more": (1, 0),
    "two": (2, 1500),
    "below a block": (15, 700),
    "a block": (64, 0),
    "a block and one": (65, 0),
    "blocks": (128, 64),
    "blocks and some": (150, 37),
    "no depth": (211, 0),
    "deep": (33, 1999),
}
"""Queries, and keys before them."""


def arrays(heads, kv_heads, length, depth, *, dim=16, value_dim=None, seed=0, spread=1.0):
    """Return queries, keys and values."""
    keys = mx.random.split(mx.random.key(seed), 3)
    total = depth + length
    shapes = (
        (1, heads, length, dim),
        (1, kv_heads, total, dim),
        (1, kv_heads, total, value_dim or dim),
    )
    q, k, v = (
        mx.random.normal(shape, key=key) for shape, key in zip(shapes, keys, strict=True)
    )
    return q * spread, k, v


def reference(queries, keys, values, *, scale=0.25, causal=True):
    """Compute it the long way."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = (mx.repeat(part, group, axis=1) for part in (keys, values))
    scores = (queries * scale) @ keys.swapaxes(-1, -2)
    if causal:
        length, total = scores.shape[-2:]
        visible = mx.arange(total - length, total)[:, None] >= mx.arange(total)
        scores = mx.where(visible, scores, -math.inf)
    return mx.softmax(scores, axis=-1, precise=True) @ values


def builtin(queries, keys, values, *, scale=0.25, mask="causal", cache=None, sinks=None):
    return base.scaled_dot_product_attention(
        queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks
    )


@pytest.fixture
def fallbacks(monkeypatch):
    """Count the calls that go on to mlx-lm's attention."""
    calls = []
    original = base.scaled_dot_product_attention

    def counted(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(base, "scaled_dot_product_attention", counted)
    return calls


@pytest.fixture
def every_size_is_fast(monkeypatch):
    monkeypatch.setattr(cpu, "_MIN_SCORES", 0)


@pytest.mark.usefixtures("every_size_is_fast")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("heads", HEADS)
def test_it_is_mlx_s_attention(heads, size, fallbacks):
    q, k, v = arrays(*HEADS[heads], *SIZES[size])
    for mask in ("causal", None):
        found = attend(q, k, v, None, 0.25, mask)
        assert not fallbacks
        expected = builtin(q, k, v, mask=mask)
        fallbacks.clear()
        assert found.shape == expected.shape
        assert found.dtype == mx.float32
        assert mx.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize(("dim", "value_dim"), [(8, 8), (64, 64), (80, 48), (24, 40)])
@pytest.mark.parametrize("mask", ["causal", None])
def test_dimensions_of_keys_and_values_may_differ(dim, value_dim, mask, fallbacks):
    q, k, v = arrays(6, 2, 77, 100, dim=dim, value_dim=value_dim)
    found = attend(q, k, v, None, 0.25, mask)
    assert not fallbacks
    expected = reference(q, k, v, causal=mask is not None)
    assert found.shape == (1, 6, 77, value_dim)
    assert mx.abs(found - expected).max() < TOLERANCE


def test_blocks_of_any_length_give_the_same(monkeypatch):
    q, k, v = arrays(4, 2, 130, 61)
    expected = reference(q, k, v)
    for scores in (1, 4 * 191 * 23, 4 * 191 * 64, 1 << 30):
        monkeypatch.setattr(cpu, "BLOCK_SCORES", scores)
        assert mx.abs(attend(q, k, v, None, 0.25, "causal") - expected).max() < TOLERANCE


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("mask", ["causal", None])
def test_scores_of_any_range(spread, mask, fallbacks):
    """With large ones nearly every exponential underflows."""
    q, k, v = arrays(4, 2, 90, 40, spread=spread)
    found = attend(q, k, v, None, 0.25, mask)
    assert not fallbacks
    expected = reference(q, k, v, causal=mask is not None)
    # Scores of a size s are themselves exact to s * 6e-8 only.
    assert mx.abs(found - expected).max() < TOLERANCE * max(1.0, spread)


def test_what_underflows_counts_for_nothing():
    """One key far above the rest; the others may hold anything finite."""
    q, k, v = arrays(4, 4, 70, 200, seed=3)
    k[..., 0, :] = 0.0
    k[..., 1:, :] = -40.0
    q = mx.abs(q) + 1.0
    v[..., 1:, :] = 1e6
    found = attend(q, k, v, None, 1.0, "causal")
    assert mx.abs(found - v[..., :1, :]).max() < TOLERANCE


@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_nan_stays_nan(part, fallbacks):
    q, k, v = arrays(4, 2, 80, 20)
    broken = {"queries": q, "keys": k, "values": v}[part]
    broken[..., 50, 3] = mx.nan
    found = mx.isnan(attend(q, k, v, None, 0.25, "causal"))
    assert not fallbacks
    first = 50 if part == "queries" else 50 - 20
    seeing = found[:, :, first : first + 1] if part == "queries" else found[:, :, first:]
    assert (seeing[..., 3] if part == "values" else seeing).all()
    # A broken key or value reaches some queries before it too, as it does in MLX's own.
    if part == "queries":
        assert int(found.sum()) == seeing.size


def test_an_infinite_score_is_not_an_answer():
    q, k, v = arrays(4, 2, 80, 20)
    k[..., 50, :] = mx.inf
    assert mx.isnan(attend(mx.abs(q), k, v, None, 0.25, "causal")[:, :, 30:]).all()


# -- where mlx's attention is called --------------------------------------------


@pytest.mark.parametrize("kind", [mx.bool_, mx.float32])
def test_an_array_for_a_mask_is_left_to_mlx(kind, fallbacks):
    q, k, v = arrays(4, 2, 60, 90)
    visible = mx.random.bernoulli(0.5, (60, 150), key=mx.random.key(1))
    visible[:, 0] = True
    mask = visible if kind == mx.bool_ else mx.where(visible, 0.0, -1e9)
    found = attend(q, k, v, None, 0.25, mask)
    assert len(fallbacks) == 1
    assert mx.array_equal(found, builtin(q, k, v, mask=mask))


def test_sinks_are_left_to_mlx(fallbacks):
    q, k, v = arrays(4, 2, 60, 90)
    sinks = mx.array([0.5, 1.0, -1.0, 3.0])
    found = attend(q, k, v, None, 0.25, "causal", sinks)
    assert len(fallbacks) == 1
    assert mx.array_equal(found, builtin(q, k, v, sinks=sinks))
    assert mx.abs(found - reference(q, k, v)).max() > 0.01, "and they matter"


def test_quantized_keys_are_left_to_mlx_lm(fallbacks):
    q, k, v = arrays(4, 2, 60, 90, dim=32)
    cache = QuantizedKVCache(group_size=32, bits=8)
    k, v = cache.update_and_fetch(k, v)
    # mlx-lm's function scales the queries in place.
    found = attend(mx.array(q), k, v, cache, 0.25, "causal")
    assert len(fallbacks) == 1
    assert mx.array_equal(found, builtin(q, k, v, cache=cache))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_other_types_are_left_to_mlx(dtype, fallbacks):
    q, k, v = (part.astype(dtype) for part in arrays(4, 2, 60, 90))
    found = attend(q, k, v, None, 0.25, "causal")
    assert len(fallbacks) == 1
    assert found.dtype == dtype
    assert mx.array_equal(found, builtin(q, k, v))


def test_several_sequences_and_small_ones_are_left_to_mlx(fallbacks):
    q, k, v = (mx.concatenate([part, part]) for part in arrays(4, 2, 60, 90))
    assert mx.array_equal(attend(q, k, v, None, 0.25, "causal"), builtin(q, k, v))
    q, k, v = arrays(4, 2, 3, 9)
    assert mx.array_equal(attend(q, k, v, None, 0.25, "causal"), builtin(q, k, v))
    # Each made one call of its own besides, to compare with.
    assert len(fallbacks) == 4


# -- the hook -------------------------------------------------------------------

NAME = "scaled_dot_product_attention"


def test_the_modules_of_a_network_are_found():
    def hooked(model_type):
        def mine():
            raise AssertionError

        with Hooks(tiny_model(model_type).network).attention(mine):
            candidates = (llama, gemma3_text, gpt_oss)
            return [m for m in candidates if m.scaled_dot_product_attention is mine]

    assert hooked("llama") == [llama]
    assert hooked("gemma3_text") == [gemma3_text]
    assert hooked("gpt_oss") == [gpt_oss]
    assert hooked("mamba2") == []


def test_an_exception_inside_the_block_unhooks():
    def mine(*args, **kwargs):
        raise ZeroDivisionError

    def fail():
        hooks = Hooks(tiny_model("llama").network)
        with hooks.attention(mine), hooks.swiglu(mine):
            assert llama.swiglu is mine
            llama.scaled_dot_product_attention()

    with pytest.raises(ZeroDivisionError):
        fail()
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert llama.swiglu is activations.swiglu


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next"])
def test_a_forward_uses_it_and_leaves_nothing(model_type, monkeypatch):
    network = make_network(CONFIGS[model_type])
    model = Model(network, CONFIGS[model_type])
    modules = [sys.modules[kind.__module__] for kind in {type(network)}]
    during = []
    kind = type(network)

    def call(self, inputs, cache=None):
        during.append([getattr(module, NAME) for module in modules])
        return kind.__call__(self, inputs, cache)

    network.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    blocks = []
    original = cpu._blockwise
    monkeypatch.setattr(
        cpu, "_blockwise", lambda *a, **k: blocks.append(1) or original(*a, **k)
    )
    model.prefill(model.new_cache(), prompt_ids(100))
    assert during == [[attend] * len(modules)]
    assert blocks, "a prompt of this length takes the fast way"
    for module in modules:
        assert getattr(module, NAME) is base.scaled_dot_product_attention


def test_a_forward_that_fails_leaves_nothing():
    network = make_network(CONFIGS["llama"])
    model = Model(network, CONFIGS["llama"])
    cache = model.new_cache()
    cache.layers[1] = None
    cache.layers[0] = object()
    with pytest.raises(AttributeError):
        model.prefill(cache, prompt_ids(8))
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention


def test_on_a_gpu_nothing_is_hooked():
    network = make_network(CONFIGS["llama"])
    during = []
    kind = type(network)

    def call(self, inputs, cache=None):
        during.append(llama.scaled_dot_product_attention)
        return kind.__call__(self, inputs, cache)

    network.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    model = Model(network, CONFIGS["llama"], device="gpu")
    model.prefill(model.new_cache(), prompt_ids(8))
    assert during == [base.scaled_dot_product_attention]


# -- swiglu ---------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 7), (1, 40, 96), (3, 1, 5)])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1e4])
def test_swiglu_is_mlx_lms(shape, scale):
    gate = mx.random.normal(shape, key=mx.random.key(1)) * scale
    x = mx.random.normal(shape, key=mx.random.key(2))
    expected = activations.swiglu(gate, x)
    assert mx.allclose(swiglu(gate, x), expected, rtol=1e-5, atol=1e-6 * scale)


def test_swiglu_of_zeros_extremes_and_what_is_no_number():
    gate = mx.array([0.0, 1e30, -1e30, mx.nan])
    found = swiglu(gate, mx.ones(4)).tolist()
    assert found[:2] == [0.0, pytest.approx(1e30)]
    assert abs(found[2]) < 1e-6
    assert math.isnan(found[3])


def test_swiglu_of_other_types_is_left_to_mlx_lm():
    for kind in (mx.float16, mx.bfloat16):
        gate, x = mx.array([1.0, -2.0], kind), mx.array([3.0, 4.0], kind)
        assert swiglu(gate, x).dtype == kind
        assert mx.array_equal(swiglu(gate, x), activations.swiglu(gate, x))
