import json
import logging
import threading

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mtplx.errors import ModelLoadError
from mtplx.models.gguf_tokenizer import write_tokenizer
from mtplx.models.load import load_network
from mtplx.models.precision import plan_precision
from tests.models.gguf_files import metadata, tiny_llama

PROMPT = mx.array([[5, 6, 7, 8]])
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def saved(folder, network, **config):
    """Write a network as a model folder."""
    folder.mkdir()
    write_tokenizer(metadata(), folder)
    parameters = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), parameters)
    declared = {k: v for k, v in vars(network.args).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(declared | config))
    return folder


@pytest.fixture
def folder(tmp_path):
    network = tiny_llama()
    network.set_dtype(mx.bfloat16)
    return saved(tmp_path / "tiny-bf16", network)


def loaded(folder, **changes):
    return load_network(str(folder), **{"device": "cpu", "dtype": "auto", **changes})


def same(network, other, tolerance=1e-4):
    return float(mx.abs(network(PROMPT) - other(PROMPT)).max()) < tolerance


def dtypes(network):
    return {array.dtype for _, array in tree_flatten(network.parameters())}


def is_quantized(network):
    return any(isinstance(module, nn.QuantizedLinear) for module in network.modules())


def test_a_folder_computes_what_was_saved_and_is_named_after_itself(tmp_path):
    network = tiny_llama()
    result = loaded(saved(tmp_path / "tiny-model", network))
    assert same(result.network, network)
    assert (result.name, result.dtype, result.notes) == ("tiny-model", "float32", ())
    assert result.config["model_type"] == "llama"
    assert result.tokenizer.decode(result.tokenizer.encode("Hello")) == "Hello"


def test_a_folder_of_the_hubs_cache_has_the_hub_id(tmp_path):
    folder = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    folder.parent.mkdir(parents=True)
    assert loaded(saved(folder, tiny_llama())).name == "org/tiny"


def test_a_folder_may_be_named_relative_to_the_working_directory(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert loaded(".").name == "tiny-bf16"


@pytest.mark.parametrize(
    ("dtype", "expected", "notes"),
    [
        ("auto", mx.float32, ("cast to float32",)),
        ("model", mx.bfloat16, ()),
        ("bfloat16", mx.bfloat16, ()),
        ("float16", mx.float16, ("cast to float16",)),
        ("float32", mx.float32, ("cast to float32",)),
    ],
)
def test_parameters_have_the_type_that_was_asked_for(folder, dtype, expected, notes):
    result = loaded(folder, dtype=dtype)
    assert dtypes(result.network) == {expected}
    assert result.notes == notes
    assert result.dtype == str(expected).removeprefix("mlx.core.")


@pytest.fixture
def quantized(tmp_path):
    network = tiny_llama()
    nn.quantize(network, group_size=32, bits=4)
    return saved(
        tmp_path / "tiny-q4", network, quantization={"group_size": 32, "bits": 4}
    ), network


def test_quantized_layers_are_expanded_on_the_cpu_without_rounding(quantized):
    folder, network = quantized
    result = loaded(folder)
    assert not is_quantized(result.network)
    assert dtypes(result.network) == {mx.float32}
    assert result.notes == ("dequantized to float32",)
    assert same(result.network, network)


def test_quantized_layers_stay_where_a_type_is_asked_for(quantized):
    folder, network = quantized
    result = loaded(folder, dtype="bfloat16")
    assert is_quantized(result.network)
    assert dtypes(result.network) == {mx.uint32, mx.bfloat16}
    assert result.dtype == "bfloat16"
    assert same(loaded(folder, dtype="model").network, network)


def test_any_thread_may_run_what_was_loaded(tmp_path):
    network = tiny_llama(rope_scaling=LLAMA3, rope_theta=500000.0)
    results = [loaded(saved(tmp_path / "tiny", network)).network]
    constants = [module["_freqs"] for module in results[0].modules() if "_freqs" in module]
    assert constants, "this network holds constants that are no parameters"
    expected = network(PROMPT)
    mx.eval(expected)

    def run():
        logits = results[0](PROMPT)
        mx.eval(logits)
        results.append(logits)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert float(mx.abs(results[1] - expected).max()) < 1e-4


@pytest.mark.parametrize(
    ("wanted", "device", "plan"),
    [
        ("auto", "cpu", ("float32", True)),
        ("auto", "gpu", (None, False)),
        ("model", "cpu", (None, False)),
        ("float16", "cpu", ("float16", False)),
        ("float32", "gpu", ("float32", False)),
    ],
)
def test_precision_follows_setting_and_device(wanted, device, plan):
    chosen = plan_precision(wanted, device=device, float32_bytes=7, available_bytes=10)
    assert (chosen.dtype, chosen.dequantize) == plan
    assert chosen.warning is None


def test_a_model_too_large_for_float32_stays_as_it_is_with_the_price():
    chosen = plan_precision("auto", device="cpu", float32_bytes=8, available_bytes=10)
    assert (chosen.dtype, chosen.dequantize) == (None, False)
    assert "80 times slower" in chosen.warning


def test_the_price_is_logged(folder, monkeypatch, caplog):
    monkeypatch.setattr("mtplx.models.load.available_memory_bytes", lambda: 1000)
    with caplog.at_level(logging.WARNING):
        result = loaded(folder)
    assert result.dtype == "bfloat16"
    assert "stays as stored" in caplog.text


def adapter_for(network, folder):
    folder.mkdir()
    parameters = {"rank": 4, "dropout": 0.0, "scale": 10.0}
    linear_to_lora_layers(network, 2, parameters)
    for name, array in tree_flatten(network.parameters()):
        if name.endswith("lora_b"):
            network.load_weights(
                [(name, 0.1 * mx.random.normal(array.shape))], strict=False
            )
    (folder / "adapter_config.json").write_text(
        json.dumps({"num_layers": 2, "lora_parameters": parameters})
    )
    weights = {
        name: a for name, a in tree_flatten(network.parameters()) if ".lora_" in name
    }
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def test_an_adapter_is_applied(tmp_path):
    base = saved(tmp_path / "tiny", tiny_llama())
    adapted = tiny_llama()
    adapter = adapter_for(adapted, tmp_path / "adapter")
    result = loaded(base, adapter=str(adapter))
    assert same(result.network, adapted)
    assert not same(result.network, tiny_llama())
    assert result.notes == (f"adapter {adapter}",)


def test_an_adapter_works_on_layers_that_are_expanded(quantized, tmp_path):
    folder, network = quantized
    adapter = adapter_for(network, tmp_path / "adapter")
    result = loaded(folder, adapter=str(adapter))
    assert not is_quantized(result.network)
    assert same(result.network, network)


@pytest.mark.parametrize("broken", ["missing", "empty", "damaged"])
def test_a_broken_adapter_is_one_error(folder, tmp_path, broken):
    adapter = tmp_path / "adapter"
    if broken != "missing":
        adapter.mkdir()
    if broken == "damaged":
        (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="adapter"):
        loaded(folder, adapter=str(adapter))


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def cut_weights(folder, length):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda f: (f / "config.json").write_text("{}"), "no model_type"),
        (lambda f: rewrite_config(f, model_type="unheard_of"), "unheard_of not supported"),
        (lambda f: rewrite_config(f, num_hidden_layers=3), "cannot be loaded"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: cut_weights(f, 20_000), "incomplete"),
        (lambda f: cut_weights(f, 4), "incomplete"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    ],
)
def test_a_damaged_folder_is_one_error_that_names_it(folder, damage, named):
    damage(folder)
    with pytest.raises(ModelLoadError, match=named) as caught:
        loaded(folder)
    assert "tiny-bf16" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "~/nothing-here", "../x", "a/b/c", "x.gguf", ""]
)
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ModelLoadError, match="There is no model at"):
        loaded(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ModelLoadError, match=r"Name its folder, or a \.gguf file"):
        loaded(tmp_path / "model.bin")


def test_a_hub_that_cannot_be_reached_is_one_error_with_the_ways_out(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError) as caught:
        loaded("nobody/no-such-model")
    for part in ("'nobody/no-such-model'", "spelling", "log in", "`demo`"):
        assert part in str(caught.value)
