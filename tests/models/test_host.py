"""State to host memory and back: what comes back computes what the original would."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mtplx.models.cache import KVRows, restore_cache, take_snapshot
from mtplx.models.host import (
    rows_from_host,
    rows_to_host,
    snapshot_from_host,
    snapshot_to_host,
)
from tests.tiny_models import CONFIGS, WINDOW, prompt_ids, tiny_model

PROMPT = prompt_ids(3 * WINDOW)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_cache_comes_back_as_it_was(model_type):
    model = tiny_model(model_type)
    cache = model.new_cache()
    model.prefill(cache, PROMPT[:-1])
    length = cache.offset
    views = [cache.buffer.rows(0, 10), cache.buffer.rows(10, length)]
    rows = rows_to_host(views)
    snapshot = snapshot_to_host(take_snapshot(cache))
    assert rows.nbytes + snapshot.nbytes > 0
    layers = make_prompt_cache(model.network)
    restored = restore_cache(
        make_prompt_cache(model.network),
        length,
        [rows_from_host(rows, layers)],
        snapshot_from_host(snapshot, layers),
        room=4,
    )
    for state in (cache, restored):
        model.decode(state, 0, token_ids=PROMPT[-1:])
    assert mx.array_equal(cache.logits, restored.logits)


def test_dtypes_that_numpy_lacks_survive():
    model = tiny_model("llama")
    cache = model.new_cache()
    model.prefill(cache, PROMPT)
    for leaf in cache.buffer.leaves:
        leaf.keys, leaf.values = (a.astype(mx.bfloat16) for a in (leaf.keys, leaf.values))
    host = rows_to_host([KVRows(cache.buffer, 0, 5)])
    assert {str(array.dtype) for array in host.arrays.values()} == {"uint16"}
    back = rows_from_host(host, make_prompt_cache(model.network))
    kept = cache.buffer.leaves[0].keys[..., :5, :]
    assert mx.array_equal(back.buffer.leaves[0].keys, kept)
    assert back.buffer.leaves[0].keys.dtype == mx.bfloat16


def test_state_of_another_model_is_refused():
    small, large = tiny_model("llama"), tiny_model("gemma3_text")
    cache = small.new_cache()
    small.prefill(cache, PROMPT)
    snapshot = snapshot_to_host(take_snapshot(cache))
    with pytest.raises(ValueError, match="lacks a layer"):
        snapshot_from_host(snapshot, make_prompt_cache(large.network))
