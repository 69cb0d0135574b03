"""What the server remembers of responses, so that the next one can go on from there.

In memory and bounded: the responses used longest ago are forgotten first. A response is
there only for the API key that made it; to any other it does not exist. An item (a
message, a call) is held once, however many responses of a conversation read it.
Runs on the event loop.

Invariants: an item is held as long as a stored response reads or wrote it, no longer;
``nbytes`` is the size of all that is stored, and at most ``max_bytes``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtplx.errors import ResponseNotFoundError
from mtplx.server.responses import dump

Item = Mapping[str, Any]

MAX_RESPONSES = 4096
MAX_BYTES = 128 * 1024**2


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        owner: The API key that made it; None where there are no keys.
        body: As it was sent; ``output`` is in it.
        read: The items the model read: of the responses before, then its own input.
    """

    owner: str | None
    body: Mapping[str, Any]
    read: tuple[Item, ...]

    @property
    def response_id(self) -> str:
        """The id clients know it by."""
        return str(self.body["id"])

    @property
    def items(self) -> tuple[Item, ...]:
        """The conversation so far: what was read, and the answer."""
        return (*self.read, *self.body["output"])


@dataclass
class _Held:
    owner: str | None
    item: Item
    nbytes: int
    holders: int = 0


@dataclass
class ResponseStore:
    """The responses that can be retrieved and continued.

    Attributes:
        max_responses: Most that are kept.
        max_bytes: Most bytes that they take, as JSON.
        nbytes: Bytes that they take now.
    """

    max_responses: int = MAX_RESPONSES
    max_bytes: int = MAX_BYTES
    nbytes: int = 0
    _responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    _items: dict[str, _Held] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``, which is new, and forget what does not fit any more."""
        assert response.response_id not in self._responses
        self._responses[response.response_id] = response
        self.nbytes += _size(response)
        for item in response.items:
            held = self._items.get(item["id"])
            if held is None:
                held = _Held(response.owner, item, len(dump(item)))
                self._items[item["id"]] = held
                self.nbytes += held.nbytes
            held.holders += 1
        while len(self._responses) > self.max_responses or self.nbytes > self.max_bytes:
            self._forget(next(iter(self._responses)))

    def find(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """Return a response of ``owner``, if there is one; it counts as used now."""
        response = self._responses.get(response_id)
        if response is None or response.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return response

    def get(
        self,
        response_id: str,
        owner: str | None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> StoredResponse:
        """As ``find``.

        Raises:
            ResponseNotFoundError: There is none. ``param`` is the field that named it,
                ``code`` the word for the case where it has one of its own.
        """
        response = self.find(response_id, owner)
        if response is None:
            raise _not_found("response", response_id, param, code)
        return response

    def item(self, item_id: str, owner: str | None, *, param: str | None = None) -> Item:
        """Return an item of a response of ``owner``; raises as ``get`` does."""
        held = self._items.get(item_id)
        if held is None or held.owner != owner:
            raise _not_found("item", item_id, param)
        return held.item

    def delete(self, response_id: str, owner: str | None) -> None:
        """Forget a response of ``owner``; raises as ``get`` does."""
        self.get(response_id, owner)
        self._forget(response_id)

    def check(self) -> None:
        """Assert the invariants."""
        holders: dict[str, int] = {}
        for response in self._responses.values():
            for item in response.items:
                assert self._items[item["id"]].owner == response.owner
                holders[item["id"]] = holders.get(item["id"], 0) + 1
        assert holders == {key: held.holders for key, held in self._items.items()}
        assert self.nbytes <= self.max_bytes
        assert self.nbytes == sum(
            [_size(response) for response in self._responses.values()]
            + [held.nbytes for held in self._items.values()]
        )

    def _forget(self, response_id: str) -> None:
        response = self._responses.pop(response_id)
        self.nbytes -= _size(response)
        for item in response.items:
            held = self._items[item["id"]]
            held.holders -= 1
            if held.holders == 0:
                del self._items[item["id"]]
                self.nbytes -= held.nbytes


def _size(response: StoredResponse) -> int:
    # Of the response alone: its items may be shared, and are counted by themselves.
    return len(dump({**response.body, "output": []}))


def _not_found(
    what: str, name: str, param: str | None, code: str | None = None
) -> ResponseNotFoundError:
    return ResponseNotFoundError(
        f"There is no {what} {name[:200]!r} here. Responses are kept in memory, unless "
        "`store` is false, until newer ones need the room or the server restarts; send "
        "the whole conversation as `input` instead.",
        param=param,
        code=code,
    )
