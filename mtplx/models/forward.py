"""A forward of several streams as a value: what was built, and what completes it.

``batch.py`` makes these. Runs on the thread that owns MLX.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mtplx.models.cache import PromptCache
from mtplx.models.group import RowGroup


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
