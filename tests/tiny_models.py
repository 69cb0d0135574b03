"""Tiny random models, one for each way a cache can behave."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mtplx.models import Model
from tests.text.tokenizers_factory import make_wrapper

VOCAB = 128
WINDOW = 16
"""Sliding window of the windowed models, in tokens."""

_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "head_dim": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_DENSE, "model_type": "llama", "rope_theta": 10000.0},
    "qwen3": {
        **_DENSE,
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **_DENSE,
        "model_type": "qwen3_moe",
        "rope_theta": 10000.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gemma3_text": {
        **_DENSE,
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 8,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        **_DENSE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "rope_theta": 10000,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": {
        **_DENSE,
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "full_attention_interval": 2,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "time_step_limit": [0.01, 10.0],
        "time_step_rank": "auto",
    },
    "deepseek_v3": {
        **_DENSE,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "qk_nope_head_dim": 8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "rope_theta": 10000.0,
        "attention_bias": False,
    },
    "falcon_h1": {
        **_DENSE,
        "model_type": "falcon_h1",
        "attention_bias": False,
        "mamba_chunk_size": 64,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 4,
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "mamba_rms_norm": False,
        "mamba_use_mlp": True,
        "mlp_bias": False,
        "projectors_bias": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "embedding_multiplier": 1.0,
        "key_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_in_multiplier": 1.0,
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "ssm_out_multiplier": 1.0,
        "mamba_conv_kernel": 4,
    },
}
"""By model type of mlx-lm: dense attention, mixture of experts, sliding windows (with
and without sinks), gated delta net, state space, latent attention, and a layer that
has both attention and a recurrent state."""

ANY_PREFIX = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
"""Those whose state can be cut at any token."""


def make_network(config: dict[str, Any], *, seed: int = 0) -> nn.Module:
    """Return a network with random weights, the same for the same seed."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    network = module.Model(module.ModelArgs.from_dict(config))
    network.update(tree_map(_spread, network.parameters()))
    network.eval()
    mx.eval(network.parameters())
    return network


def _spread(parameter: mx.array) -> mx.array:
    # Weights of a fresh network are so small that tokens hardly influence each other,
    # which would let a wrong cache pass.
    if parameter.ndim < 2 or not mx.issubdtype(parameter.dtype, mx.floating):
        return parameter
    return mx.random.normal(parameter.shape, scale=2.0 / parameter.shape[-1] ** 0.5)


@cache
def tiny_model(model_type: str) -> Model:
    """Return the one tiny model of that type; callers must not change it."""
    config = CONFIGS[model_type]
    return Model(make_network(config), config, name=f"tiny-{model_type}")


@cache
def chat_model() -> Model:
    """Return a tiny llama that reads the byte-level test tokenizer's tokens."""
    wrapper = make_wrapper("byte_level")
    config = {**CONFIGS["llama"], "vocab_size": len(wrapper)}
    return Model(make_network(config), config, wrapper, name="tiny-chat")


def one_pass_logits(model: Model, token_ids: list[int]) -> mx.array:
    """Return ``[n, vocab]`` from one forward without a cache: the reference."""
    return model.network(mx.array([token_ids]))[0]


def prompt_ids(length: int, *, seed: int = 0) -> list[int]:
    """Return that many random token ids, the same for the same seed."""
    key = mx.random.key(seed)
    return mx.random.randint(0, VOCAB, (length,), key=key).tolist()
