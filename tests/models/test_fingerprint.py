"""Equal for the same model, different for anything that changes what it computes."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_map

from mtplx.models.fingerprint import fingerprint
from tests.text.tokenizers_factory import CHATML, make_wrapper
from tests.tiny_models import CONFIGS, make_network

CONFIG = CONFIGS["llama"]


def test_the_same_model_loaded_twice_is_the_same():
    one, two = (fingerprint(make_network(CONFIG), CONFIG, make_wrapper()) for _ in "12")
    assert one == two
    assert len(one) == 32


def test_whatever_changes_the_result_changes_the_fingerprint():
    network = make_network(CONFIG)
    half = make_network(CONFIG)
    half.update(tree_map(lambda p: p.astype(mx.bfloat16), half.parameters()))
    trained = make_network(CONFIG)
    weight = trained.layers[1].mlp.up_proj.weight
    trained.layers[1].mlp.up_proj.weight = weight * 1.001
    other_end = make_wrapper()
    other_end.add_eos_token("7")
    prints = [
        fingerprint(network, CONFIG, None),
        fingerprint(network, CONFIG, make_wrapper()),
        fingerprint(network, CONFIG, make_wrapper("byte_fallback")),
        fingerprint(network, CONFIG, make_wrapper("char")),
        fingerprint(network, CONFIG, make_wrapper(template=CHATML + " ")),
        fingerprint(network, CONFIG, other_end),
        fingerprint(network, {**CONFIG, "rope_theta": 5e5}, make_wrapper()),
        fingerprint(half, CONFIG, make_wrapper()),
        fingerprint(trained, CONFIG, make_wrapper()),
        fingerprint(make_network(CONFIG, seed=1), CONFIG, make_wrapper()),
    ]
    assert len(set(prints)) == len(prints)
