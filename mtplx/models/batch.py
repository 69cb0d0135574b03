"""Reads one token for each of several requests in one forward, and a span beside them.

Every request keeps its own caches, so that joining, leaving and cancelling move no
memory. This file decides which way of doing so is exact for the loaded network, by
trying it against single rows, and what becomes of the rows when a step fails. How rows
share a forward is ``packed.py``; which requests go into a step is the engine's
business. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache

from mtplx.errors import GenerationError
from mtplx.models.cache import CacheKind, PromptCache
from mtplx.models.cpu import Hooks
from mtplx.models.model import Model
from mtplx.models.packed import (
    PackedLayers,
    final_norm,
    mixers,
    one_call_per_row,
    only_rows,
    takes_spans,
)
from mtplx.models.trial import is_same, relative_error

logger = logging.getLogger(__name__)

BatchMode = Literal["packed", "mixer", "merged", "rows"]
"""How rows share a forward, best first.

* ``packed``: all weights are read once; each request's attention runs on its own cache.
* ``mixer``: the same, but a layer's whole mixer runs once per request.
* ``merged``: the caches are joined into padded ones and parted again in every step.
* ``rows``: nothing is shared; a forward for each request.
"""

_PRICE = {
    "merged": "every step copies the whole state of all its requests",
    "rows": "every request of a step costs a forward of its own",
}
_TRIAL_TOKENS = (3, 14, 15, 92, 65, 35, 89)
_TRIAL_ROWS = 3
_TRIAL_RING_TOKENS = 4


@dataclass(frozen=True)
class SharedSpan:
    """A span of a prompt that shares a forward with streams.

    Attributes:
        cache: Holds what comes before it.
        token_ids: Its tokens.
        is_tail: It ends the prompt: the logits of its last token are kept.
    """

    cache: PromptCache
    token_ids: Sequence[int]
    is_tail: bool


class BatchDecoder:
    """Reads one token for each of several prompt caches in one forward.

    The first thing it does is to try the ways of sharing, a handful of forwards on a
    few tokens. Nothing of that stays.

    Args:
        model: Its network is called with rows on the batch axis.

    Attributes:
        mode: The way that is used.
        fallback_reason: Why it is ``merged`` or ``rows``; None for the others.
        takes_spans: A span may share the forward of a decode. What that saves is
            reading the weights once more, most of what a short span costs.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._hooks = Hooks(model.network)
        self._mixers = mixers(model.network)
        self._norm = final_norm(model.network)
        self.mode: BatchMode = "rows"
        self.fallback_reason: str | None = None
        self.takes_spans = False
        self._choose_mode()

    def decode(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int],
        span: SharedSpan | None = None,
    ) -> dict[int, Exception]:
        """Read ``token_ids[i]`` into ``caches[i]``, and a span of a prompt if given.

        It leaves each cache as ``Model.decode(cache, 0, token_ids=(token,))`` would, and
        the span's as ``prefill_batch`` would.

        Where the forward cannot even be built, the caches are put back and the rows are
        read one by one, so that only the culprit fails. Where it fails while it is
        computed, as for want of memory, all rows are lost: what they would go back to
        has been overwritten in place, and keeping it would mean to copy every cache in
        every step.

        Args:
            caches: Complete, all different; at least one.
            token_ids: One for each.
            span: Saves time only where ``takes_spans`` is true.

        Returns:
            What went wrong, by row; the span is the row after the last. The cache of
            such a row is unusable; the others are complete.
        """
        assert len({id(cache) for cache in caches}) == len(token_ids) == len(caches)
        alone = len(caches) == 1 if span is None else not self.takes_spans
        if alone or self.mode == "rows":
            return self._read_alone(caches, token_ids, span)
        reason = None
        try:
            logits, leaves = self._build(
                self.mode, [cache.layers for cache in caches], token_ids, span
            )
        except Exception as error:
            logger.error("A shared forward failed; its rows are read alone", exc_info=error)
            reason = f"{self.mode}: {error}"
        # After the handler: what the exception refers to would keep writes from
        # being in place.
        if reason is not None:
            failures = self._read_alone(caches, token_ids, span)
            if not failures:  # So it is the sharing that fails, and would again.
                self._fall_back("rows", reason)
            return failures
        try:
            _evaluate(logits, leaves)
        except Exception as error:
            logger.error("A shared forward could not be computed", exc_info=error)
            lost = GenerationError(
                f"A step that this request shared with others failed: {error}. "
                "Send the request again, or allow fewer requests at once."
            )
            return dict.fromkeys(range(len(caches) + (span is not None)), lost)
        for cache, row in zip(caches, logits, strict=False):
            cache.offset += 1
            cache.logits = row
            cache.pending = None
        if span is not None:
            span.cache.offset += len(span.token_ids)
            span.cache.logits = logits[-1] if span.is_tail else None
            span.cache.pending = None
        return {}

    def _read_alone(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int],
        span: SharedSpan | None,
    ) -> dict[int, Exception]:
        failures: dict[int, Exception] = {}
        work = [SharedSpan(c, (t,), True) for c, t in zip(caches, token_ids, strict=True)]
        for index, row in enumerate([*work, *([] if span is None else [span])]):
            try:
                if row.is_tail:
                    self._model.decode(row.cache, 0, token_ids=row.token_ids)
                else:
                    self._model.prefill(row.cache, row.token_ids)
            except Exception as error:
                failures[index] = error
        return failures

    def _build(
        self,
        mode: BatchMode,
        requests: Sequence[list[Any]],
        token_ids: Sequence[int],
        span: SharedSpan | None = None,
    ) -> tuple[list[mx.array], list[Any]]:
        """Build the graph of one forward; if that raises, the caches are as before.

        Returns:
            For each row its logits ``[vocab]``, those of the span's last token at the
            end, and the caches that were written to.
        """
        count = len(requests)
        counts, rows = [1] * count, [[token] for token in token_ids]
        if span is not None:
            requests = [*requests, span.cache.layers]
            counts.append(len(span.token_ids))
            rows += [[token] for token in span.token_ids]
        packed = PackedLayers(requests, counts, merge=mode == "merged")
        before = [_aliased(leaf.__dict__) for leaf in packed.leaves]
        try:
            split = self._mixers if mode == "mixer" else ()
            with (
                one_call_per_row(self._hooks, split),
                self._spare_output_layer(count, span),
            ):
                logits = self._model.network(mx.array(rows), cache=packed.layers)
            packed.give_back()
            return [row[0, -1] for row in mx.split(logits, logits.shape[0])], packed.leaves
        except Exception:
            for leaf, attributes in zip(packed.leaves, before, strict=True):
                leaf.__dict__ = attributes
            raise

    def _spare_output_layer(
        self, count: int, span: SharedSpan | None
    ) -> AbstractContextManager[None]:
        """Keep the rows that decode and the last of the span for the output layer."""
        if span is None:
            return nullcontext()
        assert self._norm is not None
        return only_rows(self._norm, [slice(count), slice(-1, None)])

    # -- which way is exact -----------------------------------------------------

    def _choose_mode(self) -> None:
        requests, references = self._read_trial()
        reasons = []
        modes: tuple[BatchMode, ...] = ("packed", "mixer", "merged")
        for mode in modes:
            reason = self._try(mode, copy.deepcopy(requests), references)
            if reason is None:
                break
            reasons.append(f"{mode}: {reason}")
        else:
            mode = "rows"
        if mode in _PRICE:
            self._fall_back(mode, "; ".join(reasons))
        else:
            self.mode = mode
        if mode == "packed" and self._norm is not None and takes_spans(requests[0]):
            if CacheKind.WINDOWED in self._model.cache_kinds:
                # A network hands its true window to the mask of a span.
                requests, references = self._read_trial(shrink_rings=False)
            self.takes_spans = self._try_span(requests, references)

    def _fall_back(self, mode: BatchMode, reason: str) -> None:
        self.mode = mode
        self.takes_spans = False
        self.fallback_reason = reason
        logger.warning(
            "%s cannot share a forward between requests with their own caches (%s). "
            "Mode `%s` is used: %s.",
            self._model.name,
            reason,
            mode,
            _PRICE[mode],
        )

    def _read_trial(
        self, *, shrink_rings: bool = True
    ) -> tuple[list[list[Any]], list[mx.array]]:
        """Read one short sequence alone, and copy its caches on the way.

        Args:
            shrink_rings: Let sliding windows close within the trial.

        Returns:
            Caches of a length apart, and the logits after each of the tokens that
            follow the first of them.
        """
        cache = self._model.new_cache()
        if shrink_rings:
            _shrink_rings(cache.layers)
        first = _TRIAL_RING_TOKENS - 1
        self._model.prefill(cache, _TRIAL_TOKENS[:first])
        requests: list[list[Any]] = []
        references: list[mx.array] = []
        for token in _TRIAL_TOKENS[first:-1]:
            if len(requests) < _TRIAL_ROWS:
                requests.append(copy.deepcopy(cache.layers))
            self._model.decode(cache, 0, token_ids=(token,))
            assert cache.logits is not None
            references.append(cache.logits)
        return requests, references

    def _try(
        self, mode: BatchMode, requests: list[list[Any]], references: list[mx.array]
    ) -> str | None:
        """Return why this way is no good; None if it is exact, now and a token later."""
        following = _TRIAL_TOKENS[_TRIAL_RING_TOKENS - 1 :]
        try:
            for step in range(2):
                tokens = following[step : step + _TRIAL_ROWS]
                logits, leaves = self._build(mode, requests, tokens)
                _evaluate(logits, leaves)
                # Short by one in the second step, which saves a forward.
                for row, reference in zip(logits, references[step:], strict=False):
                    error = relative_error(row, reference)
                    if not is_same(error, self._model.dtype):
                        return f"its logits are off by {error:.2g} of the largest"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def _try_span(self, requests: list[list[Any]], references: list[mx.array]) -> bool:
        """Return whether a span and the row beside it are exact, and the token after
        the span too."""
        following = _TRIAL_TOKENS[_TRIAL_RING_TOKENS - 1 :]
        beside, layers = requests[1], requests[0]
        length = len(references) - 1
        try:
            span = SharedSpan(PromptCache(layers), following[:length], is_tail=True)
            logits, leaves = self._build("packed", [beside], [following[1]], span)
            _evaluate(logits, leaves)
            after, leaves = self._build("packed", [layers], [following[length]])
            _evaluate(after, leaves)
        except Exception:
            # Nothing is lost but a saving: the span gets a forward of its own.
            logger.debug("Spans cannot share a forward", exc_info=True)
            return False
        expected = [references[1], references[length - 1], references[length]]
        return all(
            is_same(relative_error(row, reference), self._model.dtype)
            for row, reference in zip([*logits, *after], expected, strict=True)
        )


def _evaluate(logits: list[mx.array], leaves: list[Any]) -> None:
    mx.eval(logits, [leaf.state for leaf in leaves if not leaf.empty()])


def _aliased(value: Any) -> Any:
    """Copy containers and array objects, not the arrays' memory.

    A write into an array changes the object, so that a plain reference would see it.
    An alias must be gone before evaluation: one that is held then makes the write copy
    the whole buffer (33 MB: 18 ms instead of 0.1). Taking them costs 2 to 3 us of the
    30 us that a row and layer take to build.
    """
    if isinstance(value, mx.array):
        return copy.copy(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_aliased, value))
    if isinstance(value, dict):
        return {name: _aliased(item) for name, item in value.items()}
    return value


def _shrink_rings(layers: Sequence[Any]) -> None:
    """Let sliding windows close within the trial."""
    for layer in layers:
        if isinstance(layer, CacheList):
            _shrink_rings(layer.caches)
        elif isinstance(layer, RotatingKVCache):
            layer.max_size = layer.keep + _TRIAL_RING_TOKENS
