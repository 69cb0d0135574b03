"""Makes a small hybrid model that any server for MLX can load: three layers of gated
delta net for each one of attention, with random weights and the demo model's tokenizer.

    python benchmarks/hybrid_model.py FOLDER

What it says is noise; what reading a prompt costs is not.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import mtplx.backend  # noqa: F401  # before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_next import Model, ModelArgs

from mtplx.models.demo import fetch_demo

CONFIG = {
    "model_type": "qwen3_next",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 1024,
    "moe_intermediate_size": 1024,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 8192,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}


def make_hybrid(folder: Path) -> None:
    """Write the model into a folder that does not exist yet."""
    demo = fetch_demo()
    known = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    ends = {key: known[key] for key in ("bos_token_id", "eos_token_id") if key in known}
    config = {**CONFIG, **ends, "vocab_size": known["vocab_size"]}
    mx.random.seed(0)
    network = Model(ModelArgs.from_dict(config))
    # Special tokens, the first ones, would end answers or break what clients send back.
    embeddings = network.model.embed_tokens
    embeddings.weight[:32] = 0
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    text = json.dumps({**config, "torch_dtype": "float32"}, indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make_hybrid(folder)
    print(f"A hybrid model lies in {folder}.")


if __name__ == "__main__":
    main()
