"""What is found out about a model folder without loading it, against what loading says."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mtplx.models import Model
from mtplx.models.survey import _network, loaded_weight, survey
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import rewrite_config, saved
from tests.tiny_models import CONFIGS, tiny_model


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_network_is_known_from_its_configuration(kind):
    model = tiny_model(kind)
    network = _network(CONFIGS[kind])
    assert network.cache_kinds == model.info.cache_kinds
    assert network.context_length == model.context_length
    assert network.float32_state == model.state_size


def test_no_weights_are_brought_into_memory(tmp_path):
    folder = saved(tmp_path / "tiny", tiny_llama())
    large = {"hidden_size": 8192, "intermediate_size": 1 << 15}
    rewrite_config(folder, **large, num_attention_heads=64, num_key_value_heads=8)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    network = survey(folder).network
    assert network.float32_bytes > 4 * 1024**3
    assert mx.get_peak_memory() < before + 1024**2


@pytest.mark.parametrize("dtype", ["auto", "model", "float32", "bfloat16"])
def test_what_loading_will_take(tmp_path, dtype):
    network = tiny_llama()
    network.set_dtype(mx.bfloat16)
    folder = saved(tmp_path / "tiny", network)
    told = loaded_weight(survey(folder), dtype, device="cpu", available_bytes=1 << 40)
    model = Model.load(str(folder), device="cpu", dtype=dtype)
    parameters = sum(each.nbytes for _, each in tree_flatten(model.network.parameters()))
    # The file of weights has a header.
    assert parameters <= told.weight_bytes < parameters + 10_000
    assert (told.row_bytes, told.dtype) == (model.state_size.row_bytes, model.dtype)


def index_of_two(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pointer(folder):
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (folder / "model.safetensors").write_text(text)


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5])


@pytest.mark.parametrize(
    ("damage", "what", "fix"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json", "folder that has one"),
        (lambda f: (f / "config.json").write_text("[]"), "no object", "pull"),
        (lambda f: (f / "config.json").write_text("{}"), "no model_type", "pull"),
        (lambda f: rewrite_config(f, model_type="unheard_of"), "'unheard_of'", "mlx-lm"),
        (lambda f: rewrite_config(f, hidden_size="x"), "cannot build", "mlx-lm"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights", "pull"),
        (index_of_two, "lacks model-2.safetensors", "pull"),
        (pointer, "only points to the weights", "git lfs pull"),
        (cut, "cut off", "pull"),
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer", "pull"),
    ],
)
def test_what_is_wrong_with_a_folder(tmp_path, damage, what, fix):
    folder = saved(tmp_path / "tiny", tiny_llama())
    assert survey(folder).faults == ()
    damage(folder)
    fault = survey(folder).faults[0]
    assert what in fault.what
    assert fix in fault.fix
