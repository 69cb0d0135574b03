"""Decides in which type of number a network's parameters are held.

On MLX's CPU backend only float32 is fast: half precision and quantized products run
about 80 times slower. So ``auto`` there means float32, with quantized layers
expanded, as long as that fits in memory. Runs on the thread that loads.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import dequantize_model, get_total_parameters

Precision = Literal["auto", "model", "float32", "float16", "bfloat16"]

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_MEMORY_SHARE = 0.7
"""Of the available memory, for weights. The rest is for the KV cache and activations."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrecisionPlan:
    """What will be done to the parameters.

    Attributes:
        dtype: Type to cast floating parameters to; None leaves them.
        dequantize: Expand quantized layers.
        warning: What the choice costs, or None.
    """

    dtype: Literal["float32", "float16", "bfloat16"] | None
    dequantize: bool = False
    warning: str | None = None


def plan_precision(
    wanted: Precision, *, device: str, float32_bytes: int, available_bytes: int
) -> PrecisionPlan:
    """Choose what is done.

    Args:
        wanted: The user's setting.
        device: ``cpu`` or ``gpu``.
        float32_bytes: The network's size as float32.
        available_bytes: Memory that can be taken.
    """
    if wanted == "model" or (wanted == "auto" and device == "gpu"):
        return PrecisionPlan(None)
    if wanted != "auto":
        return PrecisionPlan(wanted)
    if float32_bytes > _MEMORY_SHARE * available_bytes:
        return PrecisionPlan(
            None,
            warning=f"As float32 the model takes {float32_bytes / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB of memory is available. It stays as stored, "
            "which is about 80 times slower on the CPU. A smaller model would be fast.",
        )
    return PrecisionPlan("float32", dequantize=True)


def float32_bytes(network: nn.Module) -> int:
    """Return the size of the network's parameters as float32, in bytes."""
    return 4 * int(get_total_parameters(network))


def apply_precision(
    network: nn.Module, plan: PrecisionPlan
) -> tuple[nn.Module, str | None]:
    """Carry out a plan; nothing is evaluated.

    Returns:
        The network, and a note of what changed for humans, or None.
    """
    if plan.warning is not None:
        _logger.warning(plan.warning)
    if plan.dtype is None:
        return network, None
    before = _state(network)
    _cast(network, plan.dtype)
    if plan.dequantize:
        # Scales are float32 by now, so that expanding rounds nothing.
        network = dequantize_model(network)
        _cast(network, plan.dtype)
    if _state(network) == before:
        return network, None
    expanded = plan.dequantize and before[1]
    return network, f"{'dequantized' if expanded else 'cast'} to {plan.dtype}"


def parameter_dtype(network: nn.Module) -> str:
    """Return the type that most floating parameters have, ``float32`` say."""
    sizes: Counter[str] = Counter()
    for _, array in tree_flatten(network.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[_name(array.dtype)] += array.size
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _cast(network: nn.Module, dtype: str) -> None:
    # Some networks keep a few parameters in full precision whatever the others are.
    may_narrow = getattr(network, "cast_predicate", lambda path: True)

    def cast(path: str, array: mx.array) -> mx.array:
        castable = mx.issubdtype(array.dtype, mx.floating)
        if castable and (dtype == "float32" or may_narrow(path)):
            return array.astype(DTYPES[dtype])
        return array

    network.update(tree_map_with_path(cast, network.parameters()))


def _state(network: nn.Module) -> tuple[dict[str, Any], bool]:
    parameters = dict(tree_flatten(network.parameters()))
    return (
        {path: array.dtype for path, array in parameters.items()},
        any(path.endswith(".scales") for path in parameters),
    )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
