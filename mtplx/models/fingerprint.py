"""One number that is equal only for models that compute the same.

State may be shared between two runs only if they would have computed the same state.
The fingerprint covers what decides that: parameters (adapter and quantization
included, since they are parameters), their dtypes, the configuration, the tokenizer
and the chat template. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper

SAMPLES = 64
"""Values of each parameter that are read. Reading every byte of a large model would
cost more than loading it, and training changes all values, not a few."""


def fingerprint(
    network: nn.Module, config: dict[str, Any], tokenizer: TokenizerWrapper | None
) -> str:
    """Return 32 hexadecimal digits that identify what the model computes.

    Args:
        network: With its weights loaded.
        config: The model's configuration, JSON-like.
        tokenizer: With its chat template; None where only token ids are used.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(_tokenizer_bytes(tokenizer))
    parameters = sorted(tree_flatten(network.parameters()))
    samples = [_sample(array) for _, array in parameters]
    mx.eval(samples)
    for (name, array), sample in zip(parameters, samples, strict=True):
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()[:32]


def _sample(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    values = flat[:: max(flat.size // SAMPLES, 1)]
    # numpy has no bfloat16; every float fits float32.
    floating = mx.issubdtype(array.dtype, mx.floating)
    return values.astype(mx.float32) if floating else values


def _tokenizer_bytes(tokenizer: TokenizerWrapper | None) -> bytes:
    if tokenizer is None:
        return b""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    special = sorted(tokenizer.eos_token_ids)
    return repr((vocabulary, tokenizer.chat_template, special)).encode()
