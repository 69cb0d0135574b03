"""A loaded model, ready to read prompts and choose tokens.

Decides what a forward computes (state only, or logits too) and answers what the other
layers ask of a model: its cache kinds, its context, its fingerprint. Loading is
``load.py``; what is inside a cache is ``cache.py``. Every method runs on the thread
that owns MLX.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mtplx.backend import Device, compute_description, resolve_device
from mtplx.models.cache import (
    CacheKind,
    PromptCache,
    StateSize,
    cache_kind,
    state_size,
)
from mtplx.models.cpu import Hooks, attend, swiglu
from mtplx.models.fingerprint import fingerprint
from mtplx.models.load import load_network
from mtplx.models.precision import Precision
from mtplx.models.survey import context_length
from mtplx.types import ModelInfo, Progress, StateKey

logger = logging.getLogger(__name__)

PREFILL_WINDOW_TOKENS = {"cpu": 512, "gpu": 2048}
"""Longest span by device: long enough to keep the device busy, short enough that what
waits for the end of a span does not wait for seconds on end."""

TRACED_CPU_BYTES = 64 * 1024**2
"""Most bytes of weights of a model whose forwards are traced on the CPU backend."""


class Model:
    """An mlx-lm network with its tokenizer.

    Args:
        network: Called as ``network(token_ids[1, n], cache=layers)``; returns logits
            ``[1, n, vocab]``.
        config: The model's configuration (``config.json``).
        tokenizer: None where only token ids are used.
        name: What clients call it.
        device: ``cpu`` or ``gpu``.
        dtype: Of the floating point parameters, for humans.
        backend: Library behind the matrix products, for humans.
        traces: Forwards of streams are traced and replayed where that is exact.
    """

    def __init__(
        self,
        network: nn.Module,
        config: dict[str, Any],
        tokenizer: TokenizerWrapper | None = None,
        *,
        name: str = "model",
        device: Device = "cpu",
        dtype: str = "float32",
        backend: str = "",
        traces: bool = False,
    ) -> None:
        self.network = network
        self.config = config
        self.tokenizer = tokenizer
        self.name = name
        self.device = device
        self.dtype = dtype
        self.backend = backend
        self.traces = traces
        self.created = int(time.time())
        self._hooks = Hooks(network)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        device: Literal["auto", "cpu", "gpu"] = "auto",
        dtype: Precision = "auto",
        adapter: str | None = None,
        progress: Progress | None = None,
    ) -> Model:
        """Load a model by name; see ``load.load_network`` for the arguments.

        Raises:
            ModelLoadError: The model cannot be had or read.
            ConfigError: A GPU is asked for and there is none.
        """
        chosen = resolve_device(device)
        loaded = load_network(
            name, device=chosen, dtype=dtype, adapter=adapter, progress=progress
        )
        for note in loaded.notes:
            logger.info("%s: %s", loaded.name, note)
        return cls(
            loaded.network,
            loaded.config,
            loaded.tokenizer,
            name=loaded.name,
            device=chosen,
            dtype=loaded.dtype,
            backend=compute_description(chosen),
            traces=_is_worth_tracing(loaded.network, chosen),
        )

    # -- what it is -------------------------------------------------------------

    @cached_property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The kind of each layer's cache, in the order of the cache list."""
        return tuple(cache_kind(layer) for layer in make_prompt_cache(self.network))

    @cached_property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return context_length(self.config)

    @cached_property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        probe = self.network(mx.array([[0]]))
        return int(probe.shape[-1])

    @cached_property
    def state_size(self) -> StateSize:
        """What the state of a sequence weighs."""
        cache = self.new_cache()
        self.prefill(cache, (0,))
        return state_size(cache)

    @property
    def prefill_window(self) -> int:
        """Longest prefill span, in tokens, that suits the device."""
        return PREFILL_WINDOW_TOKENS[self.device]

    @cached_property
    def state_key(self) -> StateKey:
        """What the SessionBank files this model's state under."""
        any_prefix = all(kind is CacheKind.TRIMMABLE for kind in self.cache_kinds)
        return StateKey(fingerprint(self.network, self.config, self.tokenizer), any_prefix)

    @cached_property
    def info(self) -> ModelInfo:
        """The facts that the server shows."""
        return ModelInfo(
            name=self.name,
            context_length=self.context_length,
            vocab_size=self.vocab_size,
            device=self.device,
            dtype=self.dtype,
            cache_kinds={str(kind): n for kind, n in Counter(self.cache_kinds).items()},
            fingerprint=self.state_key.fingerprint,
            backend=self.backend,
            created=self.created,
        )

    # -- what it does -----------------------------------------------------------

    def new_cache(self) -> PromptCache:
        """Return an empty cache."""
        return PromptCache(make_prompt_cache(self.network))

    def prefill(self, cache: PromptCache, token_ids: Sequence[int]) -> None:
        """Read tokens into the cache without computing logits.

        Only the cache is evaluated, so the output layer never runs.
        """
        self._forward(cache, token_ids)
        cache.evaluate()
        cache.offset += len(token_ids)
        cache.logits = cache.pending = None

    def decode(
        self, cache: PromptCache, max_new_tokens: int = 1, *, token_ids: Sequence[int] = ()
    ) -> mx.array:
        """Go on from a complete cache, greedily.

        Args:
            cache: Complete up to the last token, as a tail leaves it.
            max_new_tokens: Tokens to choose. 0 reads ``token_ids`` and chooses none:
                how the tail of a prompt is run.
            token_ids: Read these first. When empty, the token that the last call
                chose, if any, is read.

        Returns:
            ``[max_new_tokens, vocab]``: the logits from which each token was chosen as
            the largest. The last one chosen is read by the next call.

        Raises:
            ValueError: The cache has no logits to go on from and no token to read.
        """
        if not token_ids and cache.pending is not None:
            token_ids = (cache.pending,)
        if token_ids:
            self._read(cache, token_ids)
        rows: list[mx.array] = []
        for step in range(max_new_tokens):
            if step:
                self._read(cache, (int(mx.argmax(rows[-1])),))
            if cache.logits is None:
                raise ValueError("The cache has no logits: run its tail first.")
            rows.append(cache.logits)
        if rows:
            cache.pending = int(mx.argmax(rows[-1]))
            return mx.stack(rows)
        return mx.zeros((0, self.vocab_size))

    def score(self, cache: PromptCache, token_ids: Sequence[int]) -> mx.array:
        """Read tokens as ``decode`` does, and return the logits of all, ``[n, vocab]``."""
        logits = self._forward(cache, token_ids)[0]
        mx.eval(logits)
        cache.evaluate()
        cache.offset += len(token_ids)
        cache.logits = logits[-1]
        cache.pending = None
        return logits

    def _read(self, cache: PromptCache, token_ids: Sequence[int]) -> None:
        logits = self._forward(cache, token_ids)[0, -1]
        mx.eval(logits)
        cache.evaluate()
        cache.offset += len(token_ids)
        cache.logits = logits
        cache.pending = None

    def _forward(self, cache: PromptCache, token_ids: Sequence[int]) -> mx.array:
        if self.device != "cpu":
            return self.network(mx.array([token_ids]), cache=cache.layers)
        with self._hooks.attention(attend), self._hooks.swiglu(swiglu):
            return self.network(mx.array([token_ids]), cache=cache.layers)


def _is_worth_tracing(network: nn.Module, device: Device) -> bool:
    """Say whether the host's work is much of a step, so that tracing pays.

    On the CPU the host computes the products too. Beside those of a larger model what
    tracing saves is little, and a C++ compiler has to run for some seconds first.
    """
    nbytes = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
    return device != "cpu" or nbytes <= TRACED_CPU_BYTES
