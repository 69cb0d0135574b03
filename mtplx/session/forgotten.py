"""What the bank held once and why it does not any more.

A prompt is remembered by a hash of every ``GRID`` tokens of it, chained from its
beginning, so that a later miss can say that its state was evicted, or was too large to
keep, and how long it was. Nothing can be restored from here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from mtplx.session.state import TokenRun
from mtplx.types import StateKey

GRID = 32
_MOST_HASHES = 65_536


class Forgotten:
    """The most recent losses, by token prefix."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[int, str] = OrderedDict()

    def add(self, key: StateKey, tokens: TokenRun, start: int, reason: str) -> None:
        """Remember that the state of ``tokens[start:]`` is gone."""
        for length, name in _chain(key, tokens):
            if length > start:
                self._reasons[name] = reason
                self._reasons.move_to_end(name)
        while len(self._reasons) > _MOST_HASHES:
            self._reasons.popitem(last=False)

    def longest(self, key: StateKey, tokens: TokenRun) -> tuple[int, str | None]:
        """Return the longest lost prefix of ``tokens``, in tokens, and why it is lost."""
        found: tuple[int, str | None] = (0, None)
        if self._reasons:
            for length, name in _chain(key, tokens):
                if reason := self._reasons.get(name):
                    found = (length, reason)
        return found


def _chain(key: StateKey, tokens: TokenRun) -> Iterator[tuple[int, int]]:
    name = hash(key)
    for end in range(GRID, len(tokens) + 1, GRID):
        name = hash((name, tokens[end - GRID : end].tobytes()))
        yield end, name
