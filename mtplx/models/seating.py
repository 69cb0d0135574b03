"""Which streams lie together in one allocation. Runs on the thread that owns MLX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtplx.models.cache import PromptCache
from mtplx.models.group import RowGroup
from mtplx.models.layout import GroupLayout

ALIKE_TOKENS = 512
"""Streams below this length lie together whatever their lengths; of longer ones none is
more than twice as long as another, since attention looks at the longest for all."""

GROUPED_TOKENS = 8192
"""Longer streams stay where they are: what copying them costs is no longer small beside
what the host saves, which is little beside reading their keys."""


class Seating:
    """Lets streams of like length lie together.

    Attributes:
        holds: Told how many bytes lie free in groups, or would; says whether there is
            room for that.
    """

    def __init__(self) -> None:
        self._groups: list[RowGroup] = []
        self.holds: Callable[[int], bool] = lambda nbytes: True

    @property
    def free_nbytes(self) -> int:
        """Bytes that lie free in groups, for streams to come."""
        self._groups = [group for group in self._groups if any(group.members)]
        return sum(group.free_nbytes for group in self._groups)

    def give_up_free_rows(self) -> None:
        """Let groups shrink to their streams; who is in them moves."""
        for group in self._groups:
            group.compact()
        self.holds(self.free_nbytes)

    def arrange(self, caches: Sequence[PromptCache], layout: GroupLayout) -> list[RowGroup]:
        """Give every stream its place; return the groups of this step."""
        for cache in caches:
            cache.enter(layout)
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
            self.give_up_free_rows()
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


def _group(cache: PromptCache) -> RowGroup:
    assert cache.place is not None
    return cache.place[0]
