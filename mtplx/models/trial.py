"""When two ways of computing the same logits count as the same.

A model is tried at load: in spans against one pass (``engine/chunking.py``), many rows in
one forward against one by one (``batch.py``). Products of another shape round otherwise,
half precision more so; what a wrong mask, position or cache does is far above either
tolerance.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mtplx.models.cache import PromptCache
from mtplx.models.layout import GroupLayout, flat
from mtplx.models.model import Model

TRIAL_ROWS = 3
_TRIAL_TOKENS = (3, 14, 15, 92, 65, 35, 89)
_TRIAL_RING_TOKENS = 4

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


class Trial:
    """One short sequence, read alone, with copies of its caches on the way.

    Args:
        model: Reads it.
        shrink_rings: Let sliding windows close within the trial.

    Attributes:
        following: The tokens after the first copy.
        references: The logits after each of them.
    """

    def __init__(self, model: Model, *, shrink_rings: bool = True) -> None:
        self._model = model
        cache = model.new_cache()
        if shrink_rings:
            _shrink_rings(cache.layers)
        first = _TRIAL_RING_TOKENS - 1
        self.following = _TRIAL_TOKENS[first:]
        self.references: list[mx.array] = []
        model.prefill(cache, _TRIAL_TOKENS[:first])
        self._copies: list[tuple[list[Any], int]] = []
        for token in _TRIAL_TOKENS[first:-1]:
            if len(self._copies) < TRIAL_ROWS:
                self._copies.append((copy.deepcopy(cache.layers), cache.offset))
            model.decode(cache, 0, token_ids=(token,))
            assert cache.logits is not None
            self.references.append(cache.logits)

    def caches(self) -> list[PromptCache]:
        """Return caches of a length apart."""
        return [PromptCache(copy.deepcopy(x), offset) for x, offset in self._copies]

    def tokens(self, step: int) -> Sequence[int]:
        """Return what each of them reads in a step."""
        return self.following[step : step + TRIAL_ROWS]

    def layout(self) -> tuple[GroupLayout | None, str | None]:
        """Return how they lie in a group, or why they cannot."""
        try:
            return GroupLayout(self._copies[0][0]), None
        except TypeError as error:
            return None, str(error)

    def true_layout(self) -> GroupLayout:
        """Return the same with windows of their true size."""
        cache = self._model.new_cache()
        self._model.prefill(cache, _TRIAL_TOKENS[:1])
        return GroupLayout(cache.layers)


def _shrink_rings(layers: Sequence[Any]) -> None:
    """Let sliding windows close within the trial."""
    for cache in flat(layers):
        if isinstance(cache, RotatingKVCache):
            cache.max_size = cache.keep + _TRIAL_RING_TOKENS
