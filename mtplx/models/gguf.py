"""Turns a llama-architecture GGUF file into an ordinary model folder.

There is one way to load a model, from a folder that mlx-lm reads, and this file leads
GGUF files onto it. It decides what of the format is supported: what MLX's reader gives
(Q4_0, Q4_1 and Q8_0 stay quantized, others become floating point, many are refused),
the tensors and rope settings of the llama architecture. The vocabulary is
``gguf_tokenizer.py``. Runs on the thread that loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mtplx.config import cache_folder
from mtplx.errors import ModelLoadError
from mtplx.models.gguf_tokenizer import write_tokenizer
from mtplx.types import Progress

_GROUP_SIZE = 32
_FORMAT = 1
"""Raised whenever a conversion changes, so that older folders are not taken for new."""

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def converted_folder(name: str, key: str) -> Path:
    """Return where the conversion of the file that ``key`` identifies is kept."""
    return cache_folder() / "converted" / f"{name}-{key}-{_FORMAT}"


def converted_path(path: Path) -> Path:
    """Return where the conversion of a GGUF file is, or will be.

    Raises:
        ModelLoadError: The file cannot be read.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from error
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:8]
    return converted_folder(path.stem, key)


def fetch_converted(path: Path, progress: Progress | None = None) -> Path:
    """Return the folder of a GGUF file, converted now unless it was before.

    Raises:
        ModelLoadError: See ``convert_gguf``.
    """
    folder = converted_path(path)
    return folder if folder.exists() else convert_gguf(path, folder, progress=progress)


def convert_gguf(path: Path, folder: Path, *, progress: Progress | None = None) -> Path:
    """Write the model in a GGUF file as a folder that mlx-lm loads.

    The folder appears whole or not at all. If another process makes it meanwhile, that
    one stays.

    Args:
        path: The file; architecture ``llama``.
        folder: Where to; its parents are created.

    Returns:
        ``folder``.

    Raises:
        ModelLoadError: The file cannot be read, holds something that is not supported,
            or the folder cannot be written.
    """
    if progress is not None:
        progress(f"Converting {path.name}", None)
    try:
        weights, metadata = _read(path)
        with _appearing_folder(folder) as partial:
            config = _config(weights, metadata)
            config |= write_tokenizer(metadata, partial)
            renamed = _rename(weights, config["num_hidden_layers"])
            mx.save_safetensors(
                str(partial / "model.safetensors"), renamed, metadata={"format": "mlx"}
            )
            text = json.dumps(config, indent=2)
            (partial / "config.json").write_text(text, encoding="utf-8")
    except ModelLoadError as error:
        raise ModelLoadError(f"{path} cannot be used. {error}") from error
    except OSError as error:
        raise ModelLoadError(
            f"The conversion of {path} cannot be written to {folder}: {error}. "
            "Set MTPLX_CACHE_DIR to a folder with room for it."
        ) from error
    return folder


@contextlib.contextmanager
def _appearing_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder beside ``folder`` that takes its name on success."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        try:
            os.replace(partial, folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    try:
        loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(
            f"It is no complete GGUF file, or has a type of quantization that MLX does "
            f"not read ({error}). Q4_0, Q4_1, Q8_0 and F16 are read; or use the original "
            "folder."
        ) from error
    weights, metadata = loaded
    with path.open("rb") as file:
        (expected,) = struct.unpack("<8xQ", file.read(16))
    # MLX stops without a word at the first tensor of a type it does not know.
    found = sum(not name.endswith((".scales", ".biases")) for name in weights)
    if found != expected:
        raise ModelLoadError(
            f"Only {found} of its {expected} tensors can be read: it has a type of "
            "quantization that MLX does not read. Q4_0, Q4_1, Q8_0 and F16 are read; or "
            "use the original folder."
        )
    plain = {
        name: value.tolist() if isinstance(value, mx.array) else value
        for name, value in metadata.items()
    }
    return weights, plain


def _config(weights: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"Its architecture is {architecture!r}, and only llama is read from GGUF. "
            "Use the model's folder instead."
        )

    def fact(name: str, default: float | None = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if not isinstance(value, int | float):
            raise ModelLoadError(f"Its setting llama.{name} is {value!r}, not a number.")
        return value

    if fact("expert_count", 0):
        raise ModelLoadError("It is a mixture of experts. Use the model's folder instead.")
    heads = fact("attention.head_count")
    head_dim = fact("attention.key_length", fact("embedding_length") // heads)
    if fact("rope.dimension_count", head_dim) != head_dim:
        raise ModelLoadError("It rotates only a part of each head, which is not supported.")
    if "token_embd.weight" not in weights:
        raise ModelLoadError(_missing("token_embd.weight"))
    theta = fact("rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fact("embedding_length"),
        "num_hidden_layers": fact("block_count"),
        "intermediate_size": fact("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "vocab_size": weights["token_embd.weight"].shape[0],
        "max_position_embeddings": fact("context_length"),
        "rope_theta": theta,
        # GGUF stores the rows of q and k in the order of interleaved rotation.
        "rope_traditional": True,
        "rope_scaling": _rope_scaling(metadata, weights.get("rope_freqs.weight"), theta),
        "tie_word_embeddings": "output.weight" not in weights,
    }
    if any(name.endswith(".scales") for name in weights):
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": 4}
    return config


def _rope_scaling(
    metadata: Mapping[str, Any], divisors: mx.array | None, theta: float
) -> dict[str, Any] | None:
    if divisors is not None:
        found = np.array(divisors.astype(mx.float32))
        for factor in (8.0, 32.0):
            expected = _llama3_divisors(2 * found.size, theta, factor)
            if np.allclose(found, expected, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
        raise ModelLoadError(
            "Its rope_freqs.weight is of no known kind. Use the model's folder instead."
        )
    kind = metadata.get("llama.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        factor = metadata.get("llama.rope.scaling.factor", 1.0)
        return {"rope_type": "linear", "factor": factor}
    raise ModelLoadError(
        f"Its rope scaling {kind!r} is not supported. Use the model's folder instead."
    )


def _llama3_divisors(dims: int, theta: float, factor: float) -> np.ndarray:
    """Return what Llama 3.1 divides each of ``dims // 2`` frequencies by."""
    turns = 8192 / (2 * math.pi * theta ** (np.arange(0, dims, 2) / dims))
    share_kept = np.clip((turns - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    return 1 / ((1 - share_kept) / factor + share_kept)


def _rename(weights: Mapping[str, mx.array], layers: int) -> dict[str, mx.array]:
    """Return the weights under mlx-lm's names, every floating one of the same type."""
    names = dict(_TOP_LEVEL)
    for layer in range(layers):
        for old, new in _BLOCK.items():
            names[f"blk.{layer}.{old}"] = f"model.layers.{layer}.{new}"
    for old in names:
        if old != "output" and f"{old}.weight" not in weights:
            raise ModelLoadError(_missing(f"{old}.weight"))
    # Norms come as float32 beside half-precision matrices; mixed types would make MLX
    # compute everything in float32.
    matrices = {a.dtype for a in weights.values() if a.ndim > 1} - {mx.uint32}
    dtype = mx.float32 if matrices == {mx.float32} else mx.float16
    renamed = {}
    for name, array in weights.items():
        if name == "rope_freqs.weight":
            continue
        stem, _, part = name.rpartition(".")
        if stem not in names or part not in ("weight", "scales", "biases"):
            raise ModelLoadError(
                f"Its tensor {name} is not part of a plain llama. "
                "Use the model's folder instead."
            )
        floating = mx.issubdtype(array.dtype, mx.floating)
        renamed[f"{names[stem]}.{part}"] = array.astype(dtype) if floating else array
    return renamed


def _missing(tensor: str) -> str:
    return (
        f"Its tensor {tensor} is missing. Fetch the file again, or use the original folder."
    )
