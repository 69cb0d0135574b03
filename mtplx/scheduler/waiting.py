"""The queue: fewest uncached tokens first, and aged prompts before all others.

A prompt ages when ``OVERTAKING_LIMIT`` times its uncached tokens were computed since it
came. Aged prompts go in order of arrival, so nothing that comes later passes them. The
queue belongs to the ``Scheduler``.

A request that is held, because its state is still on the way, keeps its place in the
count and in nothing else.

Invariants, held by ``check``: every waiting request that is not held is in ``_by_size``
once, and in exactly one of ``_by_age`` and ``_aged``; all three are sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from mtplx.scheduler.config import OVERTAKING_LIMIT
from mtplx.scheduler.request import Request

_Key = tuple[float, int, str]


class WaitingQueue:
    """Requests that have not started."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        self._by_size: list[_Key] = []
        self._by_age: list[_Key] = []
        self._aged: list[_Key] = []
        self.uncached_tokens = 0

    def __len__(self) -> int:
        return len(self._requests) + len(self._held)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._requests.values(), self._held.values())

    def push(self, request: Request) -> None:
        """Let a request wait."""
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request
        insort(self._by_size, _size_key(request))
        insort(self._by_age, _age_key(request))
        self.uncached_tokens += request.uncached_tokens

    def remove(self, request: Request) -> None:
        """Take a request out, wherever in the queue it is."""
        if self._held.pop(request.request_id, None) is not None:
            return
        del self._requests[request.request_id]
        _discard(self._by_size, _size_key(request))
        if not _discard(self._by_age, _age_key(request)):
            _discard(self._aged, _arrival_key(request))
        self.uncached_tokens -= request.uncached_tokens

    @property
    def ready(self) -> int:
        """Requests that are not held."""
        return len(self._requests)

    def hold(self, request: Request) -> None:
        """Do not let a request start until it is pushed again."""
        self.remove(request)
        self._held[request.request_id] = request

    def head(self, served_tokens: int) -> Request | None:
        """Return the request that starts next.

        Args:
            served_tokens: Prompt tokens computed so far, for all requests.
        """
        while self._by_age and self._by_age[0][0] <= served_tokens:
            request = self._requests[self._by_age.pop(0)[2]]
            insort(self._aged, _arrival_key(request))
        order = self._aged or self._by_size
        return self._requests[order[0][2]] if order else None

    def check(self) -> None:
        """Assert the invariants."""
        for order in (self._by_size, self._by_age, self._aged):
            assert order == sorted(order)
        requests = self._requests
        assert not requests.keys() & self._held.keys()
        assert self._by_size == sorted(_size_key(r) for r in requests.values())
        assert sorted(k[2] for k in self._by_age + self._aged) == sorted(requests)
        assert all(k == _age_key(requests[k[2]]) for k in self._by_age)
        assert self.uncached_tokens == sum(r.uncached_tokens for r in requests.values())


def aged_at(request: Request) -> float:
    """Return how many tokens must have been served, others' only, for it to be aged."""
    return request.served_at_arrival + OVERTAKING_LIMIT * request.uncached_tokens


def _size_key(request: Request) -> _Key:
    return (request.uncached_tokens, request.number, request.request_id)


def _age_key(request: Request) -> _Key:
    return (aged_at(request), request.number, request.request_id)


def _arrival_key(request: Request) -> _Key:
    return (0, request.number, request.request_id)


def _discard(order: list[_Key], key: _Key) -> bool:
    i = bisect_left(order, key)
    if i == len(order) or order[i] != key:
        return False
    del order[i]
    return True
