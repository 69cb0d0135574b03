"""Reads one token for each of several streams in one forward, and a span beside them.

Streams of like length lie in groups (``group.py``), so that a step costs the host the
same for one and for many; groups, and what no group can hold, share the forward as its
parts (``packed.py``). This file decides which way of doing so is exact for the loaded
network, by trying it against single rows, and what becomes of the rows when a step
fails. How a forward is run is ``runner.py``'s, which streams lie together
``seating.py``'s, and which requests go into a step the engine's business. Runs on the
thread that owns MLX.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from mtplx.errors import GenerationError
from mtplx.models.cache import CacheKind, PromptCache
from mtplx.models.forward import Forward, SharedSpan
from mtplx.models.group import RowGroup
from mtplx.models.layout import flat
from mtplx.models.model import Model
from mtplx.models.packed import Part, takes_spans
from mtplx.models.runner import BatchMode, Runner
from mtplx.models.seating import Seating
from mtplx.models.trial import TRIAL_ROWS, Trial, is_same, relative_error

logger = logging.getLogger(__name__)


class BatchDecoder:
    """Reads one token for each of several prompt caches in one forward.

    The first thing it does is to try the ways of sharing, a handful of forwards on a
    few tokens. Nothing of that stays.

    Args:
        model: Its network is called with rows on the batch axis.

    Attributes:
        seating: Says which streams lie together.
        fallback_reason: Why it is ``rows``, why no groups are formed, or why forwards
            are not replayed; None where all is as fast as can be.
        takes_spans: A span may share the forward of a decode. What that saves is
            reading the weights once more, most of what a short span costs.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._runner = Runner(model.network)
        self._last: Forward | None = None
        self.seating = Seating()
        self.fallback_reason: str | None = None
        self.takes_spans = False
        self._choose()

    @property
    def mode(self) -> BatchMode:
        """How the parts of a step share a forward."""
        return self._runner.mode

    @property
    def forms_groups(self) -> bool:
        """Streams may lie in one allocation."""
        return self._runner.layout is not None

    @property
    def traces(self) -> bool:
        """Forwards are traced and replayed."""
        return self._runner.traces

    def decode(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int],
        span: SharedSpan | None = None,
    ) -> dict[int, Exception]:
        """Read ``token_ids[i]`` into ``caches[i]``, and a span of a prompt if given.

        It leaves each cache as ``Model.decode(cache, 0, token_ids=(token,))`` would, and
        the span's as ``prefill_batch`` would.

        Args:
            caches: Complete, all different; at least one.
            token_ids: One for each.
            span: Saves time only where ``takes_spans`` is true.

        Returns:
            As ``Forward.failures``.
        """
        forward = self.begin(caches, token_ids, span)
        lost = self.finish(forward)
        if lost is not None:
            return dict.fromkeys(range(len(caches) + (span is not None)), lost)
        for cache, row in zip(caches, forward.rows, strict=False):
            cache.logits = forward.logits[row]
        return forward.failures

    def begin(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int] | mx.array,
        span: SharedSpan | None = None,
    ) -> Forward:
        """Build the forward that ``decode`` computes.

        Where it cannot even be built, the caches are as before, and what it was to do is
        done one by one, so that only the culprit fails.

        Args:
            caches: As for ``decode``. The forward before may still be under way.
            token_ids: ``[n]``; as an array it need not be computed yet.
            span: As for ``decode``.
        """
        assert len({id(cache) for cache in caches}) == len(token_ids) == len(caches)
        if span is not None and not self.takes_spans:
            return self._alone(caches, token_ids, span)
        reason = None
        try:
            self._last = self._build(caches, token_ids, span)
            return self._last
        except Exception as error:
            logger.error("A shared forward failed; its rows are read alone", exc_info=error)
            reason = f"{self.mode}: {error}"
        # After the handler: what the exception refers to would keep writes from
        # being in place.
        forward = self._alone(caches, token_ids, span)
        if not forward.failures:  # So it is the sharing that fails, and would again.
            self._runner.layout = None
            self._fall_back(reason)
        return forward

    def finish(self, forward: Forward) -> Exception | None:
        """Wait for a forward; return what all its rows are lost to, if anything.

        Where it fails while it is computed, as for want of memory, nobody is put back:
        that would mean to copy every cache in every step.
        """
        if forward is self._last:
            self._last = None
        try:
            mx.eval(forward.logits, forward.state)
        except Exception as error:
            logger.error("A shared forward could not be computed", exc_info=error)
            return GenerationError(
                f"A step that this request shared with others failed: {error}. "
                "Send the request again, or allow fewer requests at once."
            )
        forward.complete()
        return None

    def _alone(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int] | mx.array,
        span: SharedSpan | None,
    ) -> Forward:
        if self._last is not None:
            self.finish(self._last)
        tokens = (
            cast(list[int], token_ids.tolist())
            if isinstance(token_ids, mx.array)
            else token_ids
        )
        work = [
            SharedSpan(cache, (max(token, 0),), True)
            for cache, token in zip(caches, tokens, strict=True)
        ]
        failures: dict[int, Exception] = {}
        logits: dict[int, mx.array] = {}
        for index, row in enumerate([*work, *([] if span is None else [span])]):
            try:
                if row.is_tail:
                    self._model.decode(row.cache, 0, token_ids=row.token_ids)
                    assert row.cache.logits is not None
                    logits[index] = row.cache.logits
                else:
                    self._model.prefill(row.cache, row.token_ids)
            except Exception as error:
                failures[index] = error
        count = len(caches) + (span is not None)
        place = {index: at for at, index in enumerate(logits)}
        return Forward(
            mx.stack([*logits.values()]) if logits else mx.zeros((0, 1)),
            [place.get(index, -1) for index in range(count)],
            failures,
            is_complete=True,
        )

    # -- one forward ------------------------------------------------------------

    def _build(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int] | mx.array,
        span: SharedSpan | None,
    ) -> Forward:
        """Build one forward; if that raises, the caches are as before."""
        runner = self._runner
        groups: list[RowGroup] = []
        if runner.layout is not None:
            groups = self.seating.arrange(caches, runner.layout)
        # What no group holds runs in its own caches.
        own = [cache for cache in caches if cache.place is None]
        members = [*(member for group in groups for member in group.members), *own]
        row_of = {id(m): row for row, m in enumerate(members) if m is not None}
        rows = [row_of[id(cache)] for cache in caches]
        index = {id(cache): number for number, cache in enumerate(caches)}
        # A free row reads anything.
        order = [index.get(id(member), 0) for member in members]
        if isinstance(token_ids, mx.array):
            tokens = mx.maximum(token_ids, 0)
            if order != [*range(len(caches))]:
                tokens = tokens[mx.array(order)]
        else:
            tokens = mx.array([token_ids[number] for number in order])
        parts = [Part(cache.layers, 1, is_span=True) for cache in own]
        offsets = [cache.offset for cache in own]
        if span is not None:
            parts.append(Part(span.cache.layers, len(span.token_ids), is_span=True))
            start = span.cache.offset
            offsets += range(start, start + len(span.token_ids))
            tokens = mx.concatenate([tokens, mx.array([*span.token_ids], tokens.dtype)])
            rows.append(len(order))
        arguments = (
            tokens,
            [mx.array(group.offsets, mx.int32) for group in groups],
            [group.arrays for group in groups],
        )
        lengths = tuple(group.length for group in groups)
        if not parts:
            logits, arrays = runner.program(groups, lengths)(*arguments)
        else:
            leaves = [leaf for part in parts for leaf in flat(part.layers)]
            before = [_aliased(leaf.__dict__) for leaf in leaves]
            try:
                logits, arrays = runner.run(
                    lengths, *arguments, parts, offsets, len(order) if span else None
                )
            except Exception:
                for leaf, attributes in zip(leaves, before, strict=True):
                    leaf.__dict__ = attributes
                raise
            del before
        del arguments
        state: list[Any] = []
        for group, after in zip(groups, arrays, strict=True):
            group.begun(after)
            state.append(after)
        for part in parts:
            state += [leaf.state for leaf in flat(part.layers) if not leaf.empty()]
        return Forward(logits, rows, {}, state, caches, span, groups)

    # -- which way is exact -----------------------------------------------------

    def _choose(self) -> None:
        runner, trial, reasons = self._runner, Trial(self._model), []
        layout, reason = trial.layout()
        if layout is not None:
            runner.layout = layout
            reason = self._try(trial, together=True)
        if reason is not None:
            runner.layout = None
            reasons.append(f"groups: {reason}")
        modes: tuple[BatchMode, ...] = ("packed", "mixer")
        for mode in modes:
            runner.mode = mode
            reason = self._try(trial, together=False)
            if reason is None:
                break
            reasons.append(f"{mode}: {reason}")
        else:
            runner.mode = "rows"
        if runner.layout is None or runner.mode == "rows":
            self._fall_back("; ".join(reasons), runner.mode)
        if runner.mode == "packed" and runner.has_norm:
            self.takes_spans = self._try_span()
        if runner.layout is not None:
            runner.layout = trial.true_layout()
            if self._model.traces:
                runner.traces = self._try_traced()

    def _fall_back(self, reason: str, mode: BatchMode = "rows") -> None:
        self._runner.mode = mode
        self.takes_spans = self.takes_spans and mode == "packed"
        self.fallback_reason = reason
        if self.forms_groups:
            price = "streams of very different lengths cost a forward each"
        elif mode == "rows":
            price = "every request of a step costs a forward of its own"
        else:
            price = "every request of a step costs the host more time"
        logger.warning(
            "%s cannot share a forward between streams in every way (%s). Mode `%s` is "
            "used: %s.",
            self._model.name,
            reason,
            mode,
            price,
        )

    def _try(self, trial: Trial, *, together: bool, count: int = TRIAL_ROWS) -> str | None:
        """Return why this way is no good; None if it is exact, now and a token later.

        Args:
            trial: What is read.
            together: The streams lie in one group.
            count: How many.
        """
        caches = trial.caches()[:count]
        seating, self.seating = self.seating, Seating()
        self.seating.holds = lambda nbytes: together
        try:
            for step in range(2):
                forward = self._build(caches, trial.tokens(step)[:count], None)
                mx.eval(forward.logits, forward.state)
                forward.complete()
                # Short by one in the second step, which saves a forward.
                for row, reference in zip(
                    forward.rows, trial.references[step:], strict=False
                ):
                    error = relative_error(forward.logits[row], reference)
                    if not is_same(error, self._model.dtype):
                        return f"its logits are off by {error:.2g} of the largest"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.seating = seating
        return None

    def _try_traced(self) -> bool:
        """Return whether replayed forwards are exact; kernels are compiled on the way."""
        self._runner.traces = True
        trial = Trial(self._model, shrink_rings=False)
        for count, together in ((1, False), (TRIAL_ROWS, False), (TRIAL_ROWS, True)):
            reason = self._try(trial, together=together, count=count)
            if reason is not None:
                self.fallback_reason = self.fallback_reason or f"traced: {reason}"
                logger.warning(
                    "Forwards of %s are built anew in every step, which costs the host "
                    "time: tracing them fails (%s).",
                    self._model.name,
                    reason,
                )
                return False
        return True

    def _try_span(self) -> bool:
        """Return whether a span and the row beside it are exact, and the token after
        the span too."""
        # A network hands its true window to the mask of a span.
        windowed = CacheKind.WINDOWED in self._model.cache_kinds
        trial = Trial(self._model, shrink_rings=not windowed)
        beside, cache = trial.caches()[1], trial.caches()[0]
        if not takes_spans(cache.layers):
            return False
        following, references = trial.following, trial.references
        length = len(references) - 1
        runner, layout = self._runner, self._runner.layout
        seating, self.seating = self.seating, Seating()
        try:
            if layout is not None:
                runner.layout, _ = trial.layout()
            span = SharedSpan(cache, following[:length], is_tail=True)
            shared = self._build([beside], [following[1]], span)
            mx.eval(shared.logits, shared.state)
            shared.complete()
            after = self._build([cache], [following[length]], None)
            mx.eval(after.logits, after.state)
        except Exception:
            # Nothing is lost but a saving: the span gets a forward of its own.
            logger.debug("Spans cannot share a forward", exc_info=True)
            return False
        finally:
            runner.layout, self.seating = layout, seating
        found = [*(shared.logits[row] for row in shared.rows), after.logits[0]]
        expected = [references[1], references[length - 1], references[length]]
        return all(
            is_same(relative_error(row, reference), self._model.dtype)
            for row, reference in zip(found, expected, strict=True)
        )


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
