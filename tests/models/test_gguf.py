import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from mtplx.errors import ModelLoadError
from mtplx.models.gguf import convert_gguf
from mtplx.models.load import load_network
from tests.models.gguf_files import (
    HEAD_DIM,
    encoded,
    metadata,
    rounded,
    tensors_of,
    tiny_llama,
    write_gguf,
)

PROMPT = mx.array([list(range(3, 60))])


def converted(folder, network, *, types=None, extra=None, **facts):
    tensors = tensors_of(network) | (extra or {})
    path = write_gguf(folder / "tiny.gguf", tensors, metadata(**facts), types)
    return load_network(
        str(convert_gguf(path, folder / "model")), device="cpu", dtype="float32"
    )


def largest_difference(network, other):
    return float(mx.abs(network(PROMPT) - other(PROMPT)).max())


@pytest.mark.parametrize("tied", [True, False])
def test_a_float_file_computes_what_its_weights_did(tmp_path, tied):
    network = tiny_llama(tie_word_embeddings=tied)
    loaded = converted(tmp_path, network)
    assert loaded.config["tie_word_embeddings"] is tied
    assert largest_difference(loaded.network, network) < 1e-4


def test_a_half_precision_file_becomes_uniformly_half_precision(tmp_path):
    network = tiny_llama()
    tensors = tensors_of(network)
    types = {name: "F16" for name, values in tensors.items() if values.ndim == 2}
    path = write_gguf(tmp_path / "tiny.gguf", tensors, metadata(), types)
    stored = load_network(
        str(convert_gguf(path, tmp_path / "model")), device="cpu", dtype="model"
    )
    dtypes = {array.dtype for _, array in tree_flatten(stored.network.parameters())}
    assert dtypes == {mx.float16}


def test_quantized_types_may_be_mixed(tmp_path):
    network = tiny_llama()
    tensors = tensors_of(network)
    kinds = {"attn_q": "Q4_0", "ffn_down": "Q8_0", "token_embd": "Q8_0", "attn_v": "F16"}
    types = {name: kind for name in tensors for part, kind in kinds.items() if part in name}
    loaded = converted(tmp_path, network, types=types)
    assert any(
        name.endswith("scales") for name, _ in tree_flatten(loaded.network.parameters())
    )

    reference = converted_reference(tmp_path, tensors, types)
    assert largest_difference(loaded.network, network) > 1e-3, "nothing was quantized"
    # Norms become half precision beside quantized matrices.
    assert largest_difference(loaded.network, reference) < 2e-2


def converted_reference(folder, tensors, types):
    exact = {
        name: rounded(values, types.get(name, "F32")) for name, values in tensors.items()
    }
    path = write_gguf(folder / "exact.gguf", exact, metadata())
    folder = convert_gguf(path, folder / "exact")
    return load_network(str(folder), device="cpu", dtype="float32").network


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_frequencies_are_recognized(tmp_path, factor):
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = Llama3RoPE(HEAD_DIM, base=500000.0, scaling_config=scaling)
    plain = 500000.0 ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = np.array(rope._freqs) / plain
    network = tiny_llama(rope_theta=500000.0, rope_scaling=scaling)
    loaded = converted(
        tmp_path,
        network,
        extra={"rope_freqs.weight": divisors.astype(np.float32)},
        llama__rope__freq_base=500000.0,
    )
    assert loaded.config["rope_scaling"] == scaling
    assert largest_difference(loaded.network, network) < 1e-4


def test_linear_rope_scaling_is_kept(tmp_path):
    network = tiny_llama(rope_scaling={"rope_type": "linear", "factor": 4.0})
    loaded = converted(
        tmp_path,
        network,
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=4.0,
    )
    assert largest_difference(loaded.network, network) < 1e-4


@pytest.mark.parametrize(
    ("facts", "tensors", "types", "named"),
    [
        ({"general__architecture": "gemma3"}, {}, {}, "'gemma3'"),
        ({"llama__block_count": None}, {}, {}, "llama.block_count"),
        ({"llama__expert_count": 8}, {}, {}, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, {}, {}, "part of each head"),
        ({"llama__rope__scaling__type": "yarn"}, {}, {}, "'yarn'"),
        ({}, {"rope_freqs.weight": np.full(8, 3.0)}, {}, "rope_freqs.weight"),
        ({}, {"blk.0.attn_q.bias": np.zeros(64)}, {}, "attn_q.bias"),
        ({}, {}, {"blk.1.ffn_up.weight": "Q5_0"}, "Q4_0, Q4_1, Q8_0 and F16"),
        ({}, {}, {"blk.1.ffn_up.weight": "MXFP4"}, "of its 20 tensors"),
        (
            {},
            {"output.weight": np.zeros((8, 64))},
            {"output.weight": "MXFP4"},
            "Only 20 of",
        ),
        ({"tokenizer__ggml__model": "bert"}, {}, {}, "'bert'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path, facts, tensors, types, named):
    path = write_gguf(
        tmp_path / "bad.gguf", tensors_of(tiny_llama()) | tensors, metadata(**facts), types
    )
    with pytest.raises(ModelLoadError, match=named) as caught:
        convert_gguf(path, tmp_path / "out" / "model")
    assert "bad.gguf" in str(caught.value)
    assert not any((tmp_path / "out").glob("*")), "a failed conversion leaves nothing"


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_up.weight"]
)
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = tensors_of(tiny_llama())
    del tensors[name]
    path = write_gguf(tmp_path / "bad.gguf", tensors, metadata())
    with pytest.raises(ModelLoadError, match=f"{name} is missing"):
        convert_gguf(path, tmp_path / "model")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 10])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"bad\.gguf"):
        convert_gguf(path, tmp_path / "model")


def test_a_conversion_that_comes_second_leaves_the_first_alone(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tensors_of(tiny_llama()), metadata())
    first = tmp_path / "out" / "model"
    first.mkdir(parents=True)
    (first / "config.json").write_text("made by another process")
    assert convert_gguf(path, first) == first
    assert (first / "config.json").read_text() == "made by another process"
    assert list(first.parent.iterdir()) == [first]


def test_a_file_named_to_the_server_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLX_CACHE_DIR", str(tmp_path / "cache"))
    tensors = tensors_of(tiny_llama())
    path = write_gguf(tmp_path / "tiny.gguf", tensors, metadata())
    said = []
    for _ in range(2):
        loaded = load_network(
            str(path),
            device="cpu",
            dtype="auto",
            progress=lambda what, part: said.append(what),
        )
        assert loaded.name == "tiny"
        assert loaded.tokenizer.eos_token_ids == {0, 2}
    assert said.count("Converting tiny.gguf") == 1

    write_gguf(path, tensors, metadata(llama__context_length=1024))
    assert (
        load_network(str(path), device="cpu", dtype="auto").config[
            "max_position_embeddings"
        ]
        == 1024
    )


def test_the_quantized_bytes_are_those_that_mlx_reads(tmp_path):
    """Guards the writer: both sides of the tests above must not be wrong alike."""
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    for kind, bits in (("Q8_0", 8), ("Q4_0", 4)):
        assert len(encoded(values, kind)) == 8 * (2 + 4 * bits)
        path = write_gguf(
            tmp_path / kind, {"x.weight": values}, {"a": 1}, {"x.weight": kind}
        )
        read = mx.load(str(path), format="gguf")
        expanded = mx.dequantize(
            read["x.weight"], read["x.scales"], read["x.biases"], group_size=32, bits=bits
        )
        np.testing.assert_allclose(np.array(expanded), rounded(values, kind), atol=4e-3)


def test_the_folder_is_plain_json_and_safetensors(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", tensors_of(tiny_llama()), metadata())
    folder = convert_gguf(path, tmp_path / "model")
    assert {file.name for file in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2, 0]
