"""Reads one token for each of several streams in one forward, and a span beside them.

Streams of like length lie in groups (``group.py``), so that a step costs the host the
same for one and for many; groups, and what no group can hold, share the forward as its
parts (``packed.py``). This file decides which way of doing so is exact for the loaded
network, by trying it against single rows, which streams lie together, and what becomes
of the rows when a step fails. A forward of groups alone is traced once for its shapes
and replayed. Which requests go into a step is the engine's business. Runs on the thread
that owns MLX.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache

from mtplx.errors import GenerationError
from mtplx.models.cache import CacheKind, PromptCache
from mtplx.models.cpu import Hooks
from mtplx.models.group import Arrays, GroupLayout, Positions, RowGroup, flat
from mtplx.models.model import Model
from mtplx.models.packed import (
    PackedLayers,
    Part,
    final_norm,
    mixers,
    one_call_per_part,
    only_rows,
    takes_spans,
)
from mtplx.models.trial import is_same, relative_error

logger = logging.getLogger(__name__)

BatchMode = Literal["packed", "mixer", "rows"]
"""How the parts of a step share a forward, best first.

* ``packed``: all weights are read once; attention runs once per part.
* ``mixer``: the same, but a layer's whole mixer runs once per part.
* ``rows``: nothing is shared; a forward for each part.
"""

ALIKE_TOKENS = 512
"""Streams below this length lie together whatever their lengths; of longer ones none is
more than twice as long as another, since attention looks at the longest for all."""

GROUPED_TOKENS = 8192
"""Longer streams stay where they are: what copying them costs is no longer small beside
what the host saves, which is little beside reading their keys."""

_PROGRAMS = 64  # Traced forwards that are kept, each some hundred kilobytes.
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


@dataclass
class Forward:
    """A forward that was built; nothing of it need be computed yet.

    Attributes:
        logits: ``[n, vocab]``.
        rows: For each stream, and for the span after them, its row of ``logits``.
        failures: What went wrong, by stream; the span is the one after the last. The
            cache of such a one is unusable.
        state: What else must be evaluated for the step to be complete.
    """

    logits: mx.array
    rows: Sequence[int]
    failures: dict[int, Exception] = field(default_factory=dict)
    state: list[Any] = field(default_factory=list)
    caches: Sequence[PromptCache] = ()
    span: SharedSpan | None = None
    groups: Sequence[RowGroup] = ()
    dropped: bool = False
    is_complete: bool = False

    @property
    def touched(self) -> list[PromptCache]:
        """Whose state it changes."""
        return [*self.caches, *([] if self.span is None else [self.span.cache])]

    @property
    def can_drop(self) -> bool:
        """Say whether ``drop`` is possible, for all of them."""
        grouped = all(cache.place is not None for cache in self.caches)
        return grouped and not self.is_complete

    def drop(self, cache: PromptCache) -> None:
        """Leave a stream as it was before: it had ended when this was begun. Only for
        one that lies in a group."""
        self.caches = [each for each in self.caches if each is not cache]
        self.dropped = True

    def complete(self) -> None:
        """Let the caches stand behind their new tokens, now that these are evaluated."""
        if self.is_complete:
            return
        self.is_complete = True
        for group in self.groups:
            group.done(keep_before=self.dropped)
        for cache in self.caches:
            cache.offset += 1
            cache.logits = cache.pending = None
        if self.span is not None:
            cache = self.span.cache
            cache.offset += len(self.span.token_ids)
            cache.logits = self.logits[self.rows[-1]] if self.span.is_tail else None
            cache.pending = None
        # Whoever holds on to the logits holds no state.
        self.state, self.caches, self.span, self.groups = [], (), None, ()


class BatchDecoder:
    """Reads one token for each of several prompt caches in one forward.

    The first thing it does is to try the ways of sharing, a handful of forwards on a
    few tokens. Nothing of that stays.

    Args:
        model: Its network is called with rows on the batch axis.

    Attributes:
        mode: The way that is used.
        fallback_reason: Why it is ``rows``, why no groups are formed, or why forwards
            are not replayed; None where all is as fast as can be.
        takes_spans: A span may share the forward of a decode. What that saves is
            reading the weights once more, most of what a short span costs.
        traces: Forwards are traced and replayed.
        holds: Told how many bytes lie free in groups, or would; says whether there is
            room for that.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._hooks = Hooks(model.network)
        self._mixers = mixers(model.network)
        self._norm = final_norm(model.network)
        self._layout: GroupLayout | None = None
        self._programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self._last: Forward | None = None
        self.mode: BatchMode = "rows"
        self.fallback_reason: str | None = None
        self.takes_spans = False
        self.traces = False
        self._groups: list[RowGroup] = []
        self.holds: Callable[[int], bool] = lambda nbytes: True
        self._choose()

    @property
    def free_nbytes(self) -> int:
        """Bytes that lie free in groups, for streams to come."""
        self._groups = [group for group in self._groups if any(group.members)]
        return sum(group.free_nbytes for group in self._groups)

    @property
    def forms_groups(self) -> bool:
        """Streams may lie in one allocation."""
        return self._layout is not None

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
            self._layout = None
            self._fall_back(reason)
        return forward

    def finish(self, forward: Forward) -> Exception | None:
        """Wait for a forward; return what all its rows are lost to, if anything.

        Where it fails while it is computed, as for want of memory, nobody is put back:
        that would mean to copy every cache in every step.
        """
        try:
            mx.eval(forward.logits, forward.state)
        except Exception as error:
            logger.error("A shared forward could not be computed", exc_info=error)
            return GenerationError(
                f"A step that this request shared with others failed: {error}. "
                "Send the request again, or allow fewer requests at once."
            )
        forward.complete()
        if forward is self._last:
            self._last = None
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

    # -- who lies where ---------------------------------------------------------

    def _arrange(self, caches: Sequence[PromptCache]) -> list[RowGroup]:
        """Give every stream its place; return the groups of this step."""
        if self._layout is None:
            return []
        for cache in caches:
            cache.enter(self._layout)
        placed = [cache for cache in caches if cache.place is not None]
        groups: list[RowGroup] = []
        # Larger ones first, so that those who come join them.
        for cache in sorted(placed, key=lambda each: -_group(each).rows):
            group = _group(cache)
            if group.rows == 1 and (host := self._host(group, groups)):
                host.add(cache)
            elif group not in groups:
                groups.append(group)
        for group in groups:
            group.only(caches)
        self._groups = groups
        if not self.holds(self.free_nbytes):
            for group in groups:
                group.compact()
            self.holds(self.free_nbytes)
        for group in groups:
            group.reserve(max(group.offsets) + 1)
        return groups

    def _host(self, guest: RowGroup, groups: Sequence[RowGroup]) -> RowGroup | None:
        for group in groups:
            short, long = sorted((guest.length, group.length))
            alike = long <= max(ALIKE_TOKENS, 2 * short) and long <= GROUPED_TOKENS
            if alike and self.holds(self.free_nbytes + group.growth_nbytes(guest)):
                return group
        return None

    # -- one forward ------------------------------------------------------------

    def _build(
        self,
        caches: Sequence[PromptCache],
        token_ids: Sequence[int] | mx.array,
        span: SharedSpan | None,
    ) -> Forward:
        """Build one forward; if that raises, the caches are as before."""
        groups = self._arrange(caches)
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
            logits, arrays = self._program(groups, lengths)(*arguments)
        else:
            leaves = [leaf for part in parts for leaf in flat(part.layers)]
            before = [_aliased(leaf.__dict__) for leaf in leaves]
            try:
                logits, arrays = self._run(
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

    def _program(
        self, groups: Sequence[RowGroup], lengths: tuple[int, ...]
    ) -> Callable[..., Any]:
        """Return what computes a forward of groups alone."""

        def run(*arguments: Any) -> Any:
            return self._run(lengths, *arguments)

        if not self.traces:
            return run
        shapes = tuple((group.rows, group.capacity) for group in groups)
        program = self._programs.pop((lengths, shapes), None)
        if program is None:
            program = mx.compile(run)
        self._programs[lengths, shapes] = program
        if len(self._programs) > _PROGRAMS:
            self._programs.popitem(last=False)
        return program

    def _run(
        self,
        lengths: Sequence[int],
        tokens: mx.array,
        offsets: list[mx.array],
        arrays: list[list[Arrays]],
        parts: Sequence[Part] = (),
        part_offsets: Sequence[int] = (),
        kept: int | None = None,
    ) -> tuple[mx.array, list[list[Arrays]]]:
        """Compute the logits of each row, and what becomes of the groups' state.

        Args:
            lengths: For each group how far attention looks.
            tokens: ``[rows]``.
            offsets: For each group ``[rows]``.
            arrays: For each group its state.
            parts: What is no group, after these.
            part_offsets: The positions of their rows.
            kept: Rows that logits are wanted of, beside the last one; None for all.
        """
        trees = []
        for length, offset, each in zip(lengths, offsets, arrays, strict=True):
            assert self._layout is not None
            trees.append(self._layout.stand_ins(each, Positions(offset, length)))
        parts = [
            *(
                Part(tree, len(offset), is_span=False)
                for tree, offset in zip(trees, offsets, strict=True)
            ),
            *parts,
        ]
        positions = [*offsets, mx.array([*part_offsets], mx.int32)]
        logits = self._logits(parts, tokens, positions, kept)
        after = [self._layout.after(tree) for tree in trees] if self._layout else []
        return logits, after

    def _logits(
        self,
        parts: Sequence[Part],
        tokens: mx.array,
        positions: Sequence[mx.array],
        kept: int | None,
    ) -> mx.array:
        network = self._model.network
        if len(parts) == 1 or self.mode == "rows":
            outputs, start = [], 0
            with one_call_per_part(self._hooks):
                for part in parts:
                    rows = tokens[start : start + part.rows]
                    inputs = rows[None] if part.is_span else rows[:, None]
                    outputs.append(network(inputs, cache=part.layers)[:, -1])
                    start += part.rows
            return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        packed = PackedLayers(parts, mx.concatenate([*positions]))
        split = self._mixers if self.mode == "mixer" else ()
        with one_call_per_part(self._hooks, split), self._spare_output_layer(kept):
            logits = network(tokens[:, None], cache=packed.layers)[:, -1]
        packed.give_back()
        return logits

    def _spare_output_layer(self, kept: int | None) -> AbstractContextManager[None]:
        """Keep the rows that decode and the last of the span for the output layer."""
        if kept is None:
            return nullcontext()
        assert self._norm is not None
        return only_rows(self._norm, [slice(kept), slice(-1, None)])

    # -- which way is exact -----------------------------------------------------

    def _choose(self) -> None:
        trial = _Trial(self._model)
        reasons = []
        layout, reason = trial.layout()
        if layout is not None:
            self._layout = layout
            reason = self._try(trial, together=True)
        if reason is not None:
            self._layout = None
            reasons.append(f"groups: {reason}")
        modes: tuple[BatchMode, ...] = ("packed", "mixer")
        for mode in modes:
            self.mode = mode
            reason = self._try(trial, together=False)
            if reason is None:
                break
            reasons.append(f"{mode}: {reason}")
        else:
            self.mode = "rows"
        if self._layout is None or self.mode == "rows":
            self._fall_back("; ".join(reasons), self.mode)
        if self.mode == "packed" and self._norm is not None:
            self.takes_spans = self._try_span()
        if self._layout is not None:
            self._layout = trial.true_layout()
        if self._layout is not None and self._model.traces:
            self.traces = self._try_traced()

    def _fall_back(self, reason: str, mode: BatchMode = "rows") -> None:
        self.mode = mode
        self.takes_spans = self.takes_spans and mode == "packed"
        self.fallback_reason = reason
        if self._layout is not None:
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

    def _try(
        self, trial: _Trial, *, together: bool, count: int = _TRIAL_ROWS
    ) -> str | None:
        """Return why this way is no good; None if it is exact, now and a token later.

        Args:
            trial: What is read.
            together: The streams lie in one group.
            count: How many.
        """
        caches = trial.caches()[:count]
        holds, self.holds = self.holds, lambda nbytes: together
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
            self.holds = holds
            self._groups = []
        return None

    def _try_traced(self) -> bool:
        """Return whether replayed forwards are exact; kernels are compiled on the way."""
        self.traces = True
        trial = _Trial(self._model, shrink_rings=False)
        for count, together in ((1, False), (_TRIAL_ROWS, False), (_TRIAL_ROWS, True)):
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
        trial = _Trial(self._model, shrink_rings=not windowed)
        beside, cache = trial.caches()[1], trial.caches()[0]
        if not takes_spans(cache.layers):
            return False
        following, references = trial.following, trial.references
        length = len(references) - 1
        layout = self._layout
        try:
            if layout is not None:
                self._layout, _ = trial.layout()
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
            self._layout, self._groups = layout, []
        found = [*(shared.logits[row] for row in shared.rows), after.logits[0]]
        expected = [references[1], references[length - 1], references[length]]
        return all(
            is_same(relative_error(row, reference), self._model.dtype)
            for row, reference in zip(found, expected, strict=True)
        )


class _Trial:
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
            if len(self._copies) < _TRIAL_ROWS:
                self._copies.append((copy.deepcopy(cache.layers), cache.offset))
            model.decode(cache, 0, token_ids=(token,))
            assert cache.logits is not None
            self.references.append(cache.logits)

    def caches(self) -> list[PromptCache]:
        """Return caches of a length apart."""
        return [PromptCache(copy.deepcopy(x), offset) for x, offset in self._copies]

    def tokens(self, step: int) -> Sequence[int]:
        """Return what each of them reads in a step."""
        return self.following[step : step + _TRIAL_ROWS]

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


def _group(cache: PromptCache) -> RowGroup:
    assert cache.place is not None
    return cache.place[0]


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
    for cache in flat(layers):
        if isinstance(cache, RotatingKVCache):
            cache.max_size = cache.keep + _TRIAL_RING_TOKENS
