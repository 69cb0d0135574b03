"""What a shared forward leaves behind, and what becomes of its rows when it fails."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import base, deepseek_v3, llama

from mtplx.errors import GenerationError
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache
from mtplx.models.model import Model
from tests.tiny_models import CONFIGS, make_network, prompt_ids, tiny_model

POISON = 99
ROWS = 4


Rule = Callable[[list[int], Any, mx.array], mx.array]
"""Takes the token of each row, the caches and the logits; returns other logits."""


def fails(tokens, cache, logits):
    """Cannot read ``POISON``, and finds out only after the caches were written to."""
    if POISON in tokens:
        raise RuntimeError("poison")
    return logits


def fails_together(tokens, cache, logits):
    """Reads ``POISON`` only alone."""
    if POISON in tokens and len(tokens) > 1:
        raise RuntimeError("no sharing today")
    return logits


def cannot_be_computed(tokens, cache, logits):
    """Fails for ``POISON``, and only once it is evaluated."""
    if POISON in tokens:
        return logits + mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu).sum()
    return logits


def reads_caches(tokens, cache, logits):
    """Looks into its caches, as a handle does not allow."""
    assert cache is None or len(cache[0].keys) == len(tokens)
    return logits


def mixes_rows(tokens, cache, logits):
    """Gives wrong logits, and no error, as soon as it has several rows."""
    return logits + logits[:1] if len(tokens) > 1 else logits


def model_with(rule: Rule, model_type: str = "llama") -> Model:
    """Return the tiny model of that type, with a rule that its output goes through."""
    network = make_network(CONFIGS[model_type])

    class Ruled(type(network)):
        def __call__(self, inputs, cache=None):
            logits = super().__call__(inputs, cache)
            return rule(inputs[:, -1].tolist(), cache, logits)

    network.__class__ = Ruled
    return Model(network, CONFIGS[model_type], name=rule.__name__)


def read_prompts(model: Model) -> list[PromptCache]:
    caches = [model.new_cache() for _ in range(ROWS)]
    for row, cache in enumerate(caches):
        model.decode(cache, 0, token_ids=prompt_ids(4 + 3 * row, seed=row))
    return caches


def assert_as_alone(caches: list[PromptCache], tokens: dict[int, list[int]]) -> None:
    """Compare rows with a llama that has read these tokens after the prompts."""
    model = tiny_model("llama")
    for row, expected in enumerate(read_prompts(model)):
        if row in tokens:
            model.decode(expected, 0, token_ids=tokens[row])
            assert caches[row].offset == expected.offset
            assert mx.abs(caches[row].logits - expected.logits).max() < 1e-4


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_one_row_is_read_as_the_model_reads_it():
    model = tiny_model("llama")
    cache, twin = read_prompts(model)[:1], read_prompts(model)[0]
    assert BatchDecoder(model).decode(cache, [7]) == {}
    model.decode(twin, 0, token_ids=(7,))
    assert cache[0].offset == twin.offset
    assert mx.abs(cache[0].logits - twin.logits).max() < 1e-5


def test_a_row_that_turns_into_nan_is_alone_with_it():
    model = tiny_model("llama")
    caches = read_prompts(model)
    caches[2].layers[0].keys[..., 0, :] = mx.nan
    assert BatchDecoder(model).decode(caches, [7] * ROWS) == {}
    assert mx.isnan(caches[2].logits).all()
    assert_as_alone(caches, {0: [7], 1: [7], 3: [7]})


def test_a_failing_row_fails_alone(caplog):
    model = model_with(fails)
    decoder = BatchDecoder(model)
    assert decoder.mode == "packed"
    caches = read_prompts(model)
    assert decoder.decode(caches, [7] * ROWS) == {}
    failures = decoder.decode(caches, [8, 8, POISON, 8])
    assert list(failures) == [2]
    assert str(failures[2]) == "poison"
    assert decoder.mode == "packed"
    assert warnings(caplog) == []
    del caches[2]
    assert decoder.decode(caches, [9] * (ROWS - 1)) == {}
    caches.insert(2, caches[0])
    assert_as_alone(caches, {0: [7, 8, 9], 1: [7, 8, 9], 3: [7, 8, 9]})


def test_where_only_sharing_fails_it_is_given_up(caplog):
    model = model_with(fails_together)
    decoder = BatchDecoder(model)
    caches = read_prompts(model)
    assert decoder.decode(caches, [8, POISON, 8, 8]) == {}
    assert decoder.mode == "rows"
    assert decoder.fallback_reason == "packed: no sharing today"
    assert len(warnings(caplog)) == 1
    assert decoder.decode(caches, [POISON] * ROWS) == {}
    assert len(warnings(caplog)) == 1
    tokens = {row: [8, POISON] for row in range(ROWS)} | {1: [POISON, POISON]}
    assert_as_alone(caches, tokens)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next", "falcon_h1", "mamba2"])
def test_caches_of_every_kind_are_put_back(model_type):
    model = model_with(fails_together, model_type)
    decoder = BatchDecoder(model)
    caches = read_prompts(model)
    twins = copy.deepcopy(caches)
    assert decoder.mode == "packed"
    assert decoder.decode(caches, [POISON] * ROWS) == {}
    assert decoder.mode == "rows"
    for cache, twin in zip(caches, twins, strict=True):
        model.decode(twin, 0, token_ids=(POISON,))
        assert mx.array_equal(cache.logits, twin.logits)
        mine, its = (tree_flatten([c.state for c in x.layers]) for x in (cache, twin))
        for (name, a), (other, b) in zip(mine, its, strict=True):
            assert name == other
            assert mx.array_equal(a, b) if isinstance(a, mx.array) else a == b


def test_a_step_that_cannot_be_computed_fails_all_its_rows():
    model = model_with(cannot_be_computed)
    decoder = BatchDecoder(model)
    caches = read_prompts(model)
    failures = decoder.decode(caches, [8, POISON, 8, 8])
    assert list(failures) == list(range(ROWS))
    assert all(isinstance(error, GenerationError) for error in failures.values())
    # What comes next is not affected.
    others = read_prompts(model)
    assert decoder.decode(others, [8] * ROWS) == {}
    assert_as_alone(others, {row: [8] for row in range(ROWS)})


def test_what_looks_into_its_caches_shares_a_forward_within_a_group(caplog):
    model = model_with(reads_caches)
    decoder = BatchDecoder(model)
    assert (decoder.mode, decoder.forms_groups) == ("rows", True)
    assert "packed: AttributeError" in decoder.fallback_reason
    assert "mixer: AttributeError" in decoder.fallback_reason
    (warning,) = warnings(caplog)
    assert "reads_caches" in warning
    assert "very different lengths" in warning
    caches = read_prompts(model)
    for token in (7, 8):
        assert decoder.decode(caches, [token] * ROWS) == {}
    assert_as_alone(caches, {row: [7, 8] for row in range(ROWS)})


def test_what_is_never_exact_is_not_shared(caplog):
    model = model_with(mixes_rows)
    decoder = BatchDecoder(model)
    assert decoder.mode == "rows"
    assert not decoder.forms_groups
    for mode in ("groups", "packed", "mixer"):
        assert f"{mode}: its logits are off by" in decoder.fallback_reason
    assert len(warnings(caplog)) == 1
    caches = read_prompts(model)
    assert decoder.decode(caches, [7] * ROWS) == {}
    assert_as_alone(caches, {row: [7] for row in range(ROWS)})


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_nothing_stays_hooked(model_type):
    """Neither after the trial nor after a step; parameters keep their names."""
    model = tiny_model(model_type)
    module = {"llama": llama, "deepseek_v3": deepseek_v3}[model_type]
    names = [name for name, _ in tree_flatten(model.network.parameters())]
    types = [type(part) for part in model.network.modules()]
    decoder = BatchDecoder(model)
    decoder.decode(read_prompts(model), [7] * ROWS)
    assert module.scaled_dot_product_attention is base.scaled_dot_product_attention
    assert [name for name, _ in tree_flatten(model.network.parameters())] == names
    assert [type(part) for part in model.network.modules()] == types


def test_the_trial_does_not_touch_the_random_state():
    model = tiny_model("qwen3")
    before = [state.tolist() for state in mx.random.state]
    BatchDecoder(model)
    assert [state.tolist() for state in mx.random.state] == before


def test_a_step_copies_no_keys():
    """Each stream writes into its row of the group's buffers, in place."""

    def addresses():
        groups = {id(cache.place[0]): cache.place[0] for cache in caches}
        assert len(groups) == 1
        arrays = [a for g in groups.values() for layer in g.arrays for a in layer]
        return [np.asarray(memoryview(array)).ctypes.data for array in arrays]

    model = tiny_model("llama")
    decoder = BatchDecoder(model)
    caches = [model.new_cache() for _ in range(ROWS)]
    for cache in caches:
        model.prefill(cache, [3, 4, 5])
    assert decoder.decode(caches, [7] * ROWS) == {}
    before = addresses()
    assert decoder.decode(caches, [7] * ROWS) == {}
    assert addresses() == before


def test_a_recurrent_state_holds_no_memory_of_the_other_rows():
    network = make_network(CONFIGS["mamba2"])
    model = Model(network, CONFIGS["mamba2"])
    caches = [model.new_cache() for _ in range(64)]
    for cache in caches:
        model.decode(cache, 0, token_ids=(3, 4, 5))
    decoder = BatchDecoder(model)
    assert decoder.decode(caches, [7] * len(caches)) == {}
    both = mx.get_active_memory()
    state_bytes = caches[0].nbytes
    del caches[1:]
    assert decoder.decode(caches, [7]) == {}
    assert both - mx.get_active_memory() > 60 * state_bytes
