"""When two ways of computing the same logits count as the same.

A model is tried at load: in spans against one pass (``engine/chunking.py``), many rows in
one forward against one by one (``batch.py``). Products of another shape round otherwise,
half precision more so; what a wrong mask, position or cache does is far above either
tolerance.
"""

from __future__ import annotations

import mlx.core as mx

_TOLERANCE = {"float32": 1e-3}
_HALF_TOLERANCE = 0.05


def relative_error(logits: mx.array, reference: mx.array) -> float:
    """Return the largest difference, as a share of the largest logit of ``reference``."""
    logits, reference = logits.astype(mx.float32), reference.astype(mx.float32)
    return float(mx.abs(logits - reference).max() / mx.abs(reference).max())


def tolerance(dtype: str) -> float:
    """Return the largest error that is rounding, for a model of this dtype."""
    return _TOLERANCE.get(dtype, _HALF_TOLERANCE)


def is_same(error: float, dtype: str) -> bool:
    """Return whether an error is rounding, for a model of this dtype; False for NaN."""
    return error <= tolerance(dtype)
