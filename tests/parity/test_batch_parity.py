"""A request in a batch = the same request alone, for every kind of cache.

Each test also proves that the rows shared a forward, in the way that is expected.
"""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache, restore_cache, take_snapshot
from mtplx.models.model import Model
from tests.tiny_models import CONFIGS, WINDOW, make_network, prompt_ids, tiny_model

TOLERANCE = 1e-4
STEPS = 20
MODES = {"deepseek_v3": "mixer"}
"""Latent attention computes on its keys; all others share everything."""

LENGTHS = (5, WINDOW, 3 * WINDOW, 30)
"""Of the prompts: below, at and beyond the sliding window."""

every_model = pytest.mark.parametrize("model_type", CONFIGS)


def read_prompt(model: Model, row: int, layers: list | None = None) -> PromptCache:
    cache = PromptCache(layers) if layers else model.new_cache()
    model.decode(cache, 0, token_ids=prompt_ids(LENGTHS[row], seed=row))
    return cache


def next_token(cache: PromptCache) -> int:
    assert cache.logits is not None
    return int(mx.argmax(cache.logits))


def step(decoder: BatchDecoder, caches: list[PromptCache]) -> None:
    offsets = [cache.offset for cache in caches]
    assert decoder.decode(caches, [next_token(cache) for cache in caches]) == {}
    assert [cache.offset for cache in caches] == [offset + 1 for offset in offsets]
    assert all(cache.pending is None for cache in caches)


def check(found: list[mx.array], reference: mx.array) -> None:
    stacked = mx.stack(found)
    assert stacked.shape == reference.shape
    assert not mx.isnan(stacked).any()
    assert mx.abs(stacked - reference).max() < TOLERANCE
    assert mx.argmax(stacked, -1).tolist() == mx.argmax(reference, -1).tolist()


@every_model
def test_rows_that_join_and_leave_give_what_they_give_alone(model_type):
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    assert decoder.mode == MODES.get(model_type, "packed")
    assert decoder.fallback_reason is None
    caches = [read_prompt(model, row) for row in range(len(LENGTHS))]
    logits: list[list[mx.array]] = [[cache.logits] for cache in caches]
    present = {0: range(STEPS), 1: range(12), 2: range(STEPS), 3: range(7, STEPS)}
    for index in range(STEPS):
        rows = [row for row, steps in present.items() if index in steps]
        step(decoder, [caches[row] for row in rows])
        for row in rows:
            logits[row].append(caches[row].logits)
    for row, found in enumerate(logits):
        assert len(found) == len(present[row]) + 1
        check(found, model.decode(read_prompt(model, row), len(found)))


@every_model
def test_the_order_of_rows_does_not_matter(model_type):
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        caches = [read_prompt(model, row) for row in range(len(LENGTHS))]
        for _ in range(3):
            step(decoder, [caches[row] for row in order])
        found.append([cache.logits for cache in caches])
    check(found[0], mx.stack(found[1]))


@every_model
def test_a_cache_is_an_ordinary_one_afterwards(model_type):
    """It goes on alone, and what is stored of it is restored exactly."""
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    caches = [read_prompt(model, row) for row in range(len(LENGTHS))]
    for _ in range(WINDOW // 2):
        step(decoder, caches)
    for row, cache in enumerate(caches):
        assert list(map(type, cache.layers)) == list(map(type, model.new_cache().layers))
        restored = restore_cache(
            model.new_cache().layers,
            cache.offset,
            [cache.buffer.copy(0, cache.offset)],
            take_snapshot(cache),
            room=WINDOW,
        )
        token = next_token(cache)
        reference = model.decode(read_prompt(model, row), WINDOW // 2 + 1 + WINDOW)
        for continued in (cache, restored):
            model.decode(continued, 0, token_ids=(token,))
            found = model.decode(continued, WINDOW)
            check(list(found), reference[-WINDOW:])


def test_quantized_and_plain_caches_share_a_forward():
    config = {**CONFIGS["llama"], "head_dim": 32}
    model = Model(make_network(config), config)
    decoder = BatchDecoder(model)
    assert decoder.mode == "packed"

    def layers(row: int) -> list:
        if row == 1:
            return model.new_cache().layers
        return [QuantizedKVCache(group_size=32, bits=8) for _ in model.network.layers]

    caches = [read_prompt(model, row, layers(row)) for row in range(len(LENGTHS))]
    logits: list[list[mx.array]] = [[cache.logits] for cache in caches]
    for _ in range(STEPS):
        step(decoder, caches)
        for found, cache in zip(logits, caches, strict=True):
            found.append(cache.logits)
    for row, found in enumerate(logits):
        check(found, model.decode(read_prompt(model, row, layers(row)), STEPS + 1))
