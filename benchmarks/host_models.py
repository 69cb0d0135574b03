"""Networks with hardly any weights: what a step of theirs takes is the host's work.

    python benchmarks/host_models.py llama FOLDER

writes one that any server for MLX can load. Kinds: ``llama``, ``sliding`` (a window of
512 in five of six layers) and ``hybrid`` (a gated delta net in three of four).
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import mtplx.backend  # noqa: F401  # before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "vocab_size": 1024,
    "eos_token_id": 1023,
    "bos_token_id": 1022,
    "torch_dtype": "float32",
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_SMALL, "model_type": "llama", "num_hidden_layers": 36},
    "sliding": {
        **_SMALL,
        "model_type": "gemma3_text",
        "num_hidden_layers": 36,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 16,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
    },
    "hybrid": {
        **_SMALL,
        "model_type": "qwen3_next",
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 128,
        "moe_intermediate_size": 128,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
}


def make_network(kind: str) -> nn.Module:
    """Return a network of a kind, with random weights."""
    config = CONFIGS[kind]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    network: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    network.eval()
    mx.eval(network.parameters())
    return network


def make_tokenizer() -> TokenizerWrapper:
    """Return a tokenizer of bytes, with names for what is left of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = _SMALL["vocab_size"]
    names = letters + [f"Ġw{number}" for number in range(size - len(letters) - 2)]
    vocabulary = {name: index for index, name in enumerate([*names, "<bos>", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>"
    )
    return TokenizerWrapper(fast)


def write_model(kind: str, folder: Path) -> None:
    """Write the network, its configuration and the tokenizer into a new folder."""
    folder.mkdir(parents=True)
    text = json.dumps(CONFIGS[kind], indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    weights = dict(tree_flatten(make_network(kind).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    make_tokenizer()._tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    write_model(options.kind, options.folder)


if __name__ == "__main__":
    main()
