"""How much memory KV state may take, and what a first span says about the model.

An allocation that cannot be had ends the process, on Metal and on the CPU backend alike,
so memory is admitted by arithmetic before anything is computed. What a span needs
besides its state differs widely between architectures: it is measured at start, not
assumed. Engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mtplx.backend import available_memory_bytes, memory_bytes
from mtplx.models import Model

logger = logging.getLogger(__name__)

SHARE = 0.8
"""Share of the memory that weights, state and work together may take."""

LEAST_BYTES = 64 * 1024**2
"""Below this no budget makes sense; less is left where a model hardly fits at all."""

_TRIAL_TOKENS = 64


@dataclass(frozen=True)
class MemoryShares:
    """Who has which part of the memory.

    Attributes:
        total_bytes: What the device may use.
        weight_bytes: Of the models that are loaded.
        kv_bytes: Most that KV state may take.
        kv_tokens: What fits there of the first model; None where its state does not grow.
    """

    total_bytes: int
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int | None


def memory_shares(model: Model, held_bytes: int, kv_bytes: int) -> MemoryShares:
    """Return the shares of this moment; any thread, once ``model.state_size`` is known.

    Args:
        model: The first one.
        held_bytes: KV state that is held.
        kv_bytes: Most that may be held.
    """
    row_bytes = model.state_size.row_bytes
    return MemoryShares(
        total_bytes=memory_bytes(model.device),
        weight_bytes=max(mx.get_active_memory() - held_bytes, 0),
        kv_bytes=kv_bytes,
        kv_tokens=kv_bytes // row_bytes if row_bytes else None,
    )


def warm_up(model: Model, window: int) -> tuple[int, float]:
    """Run a span and a token, twice: MLX compiles kernels when they are first used, which
    takes a second that no user should wait for.

    Returns:
        Bytes that a span of ``window`` tokens needs besides weights and state, in
        proportion to the trial, and seconds that each of its tokens took.
    """
    work_bytes, token_s = 0, 0.0
    try:
        for _ in range(2):
            cache = model.new_cache()
            held_bytes = mx.get_active_memory()
            mx.reset_peak_memory()
            begin_s = time.perf_counter()
            model.prefill(cache, [0] * _TRIAL_TOKENS)
            token_s = (time.perf_counter() - begin_s) / _TRIAL_TOKENS
            work_bytes = mx.get_peak_memory() - held_bytes - cache.nbytes
            model.decode(cache, 0, token_ids=(0,))
    except Exception:
        # What is wrong will show, and be told, when a request needs it.
        logger.warning("The model failed on a first span of zeros", exc_info=True)
    return max(work_bytes, 0) * -(-window // _TRIAL_TOKENS), token_s


def room_bytes(*, total: int, available: int, weights: int, work: int = 0) -> int:
    """Return what is left for KV state; below ``LEAST_BYTES`` the model does not fit.

    Args:
        total: Memory that the device may use.
        available: What is still free of it, with the weights in memory.
        weights: Bytes of them.
        work: What a span needs besides its state.
    """
    return min(int(SHARE * total) - weights, int(SHARE * available)) - work


def default_kv_bytes(models: Sequence[Model], work_bytes: int, held_bytes: int) -> int:
    """Return what is left for KV state, and say how it came about.

    Args:
        models: Their weights are in memory.
        work_bytes: The most that a span of one of them needs.
        held_bytes: KV state that is held already.
    """
    total = memory_bytes(models[0].device)
    available = available_memory_bytes() + held_bytes
    weights = mx.get_active_memory() - held_bytes
    free = room_bytes(total=total, available=available, weights=weights, work=work_bytes)
    budget = max(free, LEAST_BYTES)
    row_bytes = models[0].state_size.row_bytes
    tokens = f", about {budget // row_bytes:,} tokens" if row_bytes else ""
    logger.info(
        "KV budget: %s%s. That is what is left of %s of memory (x %s, less %s of weights; "
        "%s are free) beside the %s that a span needs. --kv-bytes sets another.",
        gib(budget),
        tokens,
        gib(total),
        SHARE,
        gib(weights),
        gib(available),
        gib(work_bytes),
    )
    return budget


def gib(nbytes: int) -> str:
    """Return bytes for humans."""
    return f"{nbytes / 1024**3:.2f} GiB"
