"""Writes tiny llama GGUF files, of any type of tensor, good ones and bad ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers.pre_tokenizers import ByteLevel

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *sorted(ByteLevel.alphabet()),
    "ab",
]

TYPE_IDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q5_0": 6, "Q8_0": 8, "MXFP4": 39}

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(**changes: Any) -> llama.Model:
    """Return a random network with weights in the order of Hugging Face."""
    mx.random.seed(0)
    arguments = {
        "model_type": "llama",
        "hidden_size": HEADS * HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 96,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        **changes,
    }
    network = llama.Model(llama.ModelArgs.from_dict(arguments))
    # Norms other than one, and weights large enough that positions matter.
    network.apply(lambda p: p + 0.1 * mx.random.normal(p.shape))
    mx.eval(network.parameters())
    return network


def tensors_of(network: llama.Model) -> dict[str, np.ndarray]:
    """Return the network's tensors as a GGUF file names and orders them."""
    tensors = {}
    for path, array in tree_flatten(network.parameters()):
        module = path.removesuffix(".weight")
        values = np.array(array)
        if module.startswith("model.layers."):
            _, _, layer, module = module.split(".", 3)
            name = f"blk.{layer}.{_NAMES[module]}"
        else:
            name = _NAMES[module]
        if module in ("self_attn.q_proj", "self_attn.k_proj"):
            halves = values.reshape(-1, 2, HEAD_DIM // 2, values.shape[-1])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        tensors[f"{name}.weight"] = values
    return tensors


def metadata(**changes: Any) -> dict[str, Any]:
    """Return what a llama file says of itself; a value of None leaves the key out."""
    facts = {
        "general.architecture": "llama",
        "llama.embedding_length": HEADS * HEAD_DIM,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": 512,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    return {name: value for name, value in facts.items() if value is not None}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    facts: dict[str, Any],
    types: dict[str, str] | None = None,
) -> Path:
    """Write a file; ``types`` names the type of the tensors that are not F32."""
    kinds = {name: (types or {}).get(name, "F32") for name in tensors}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    for name, value in facts.items():
        header += _text(name) + _value(value)
    body = b""
    for name, values in tensors.items():
        body += b"\0" * (-len(body) % 32)
        header += _text(name) + struct.pack("<I", values.ndim)
        header += struct.pack(f"<{values.ndim}Q", *reversed(values.shape))
        header += struct.pack("<IQ", TYPE_IDS[kinds[name]], len(body))
        body += encoded(values, kinds[name])
    path.write_bytes(header + b"\0" * (-len(header) % 32) + body + b"\0" * 32)
    return path


def encoded(values: np.ndarray, kind: str) -> bytes:
    """Return the bytes of a tensor in one of the types."""
    if kind in ("F32", "F16"):
        return values.astype(np.float32 if kind == "F32" else np.float16).tobytes()
    blocks = values.reshape(-1, 32).astype(np.float32)
    if kind == "Q8_0":
        scales, whole = _quantized(blocks, 127)
        packed = whole.astype(np.int8).view(np.uint8)
    elif kind == "Q4_0":
        scales, whole = _quantized(blocks, 7)
        shifted = (whole + 8).astype(np.uint8)
        packed = shifted[:, :16] | (shifted[:, 16:] << 4)
    else:  # Types that MLX does not read: only their size matters.
        return bytes(len(blocks) * {"Q5_0": 22, "MXFP4": 17}[kind])
    return np.hstack([scales.view(np.uint8), packed]).tobytes()


def rounded(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the values that remain of a tensor in one of the types."""
    if kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16).astype(np.float32)
    blocks = values.reshape(-1, 32).astype(np.float32)
    scales, whole = _quantized(blocks, {"Q8_0": 127, "Q4_0": 7}[kind])
    return (scales.astype(np.float32) * whole).reshape(values.shape)


def _quantized(blocks: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / top).astype(np.float16)
    return scales, np.clip(np.round(blocks / scales.astype(np.float32)), -top, top)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    kind, content = _typed(value)
    return struct.pack("<I", kind) + content


def _typed(value: Any) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _text(value)
    items = [_typed(item) for item in value]
    kind = items[0][0]
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(b for _, b in items)
