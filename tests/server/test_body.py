"""Reading a body: bombs and slow senders. Bad fields are in ``test_bad_input``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from starlette.requests import Request

from mtplx.errors import DeadlineExceededError, InvalidRequestError
from mtplx.server.body import parse_object, read_object


def request(pieces: Iterable[bytes]) -> Request:
    """Return a request whose body begins with ``pieces`` and never ends."""
    rest = iter(pieces)

    async def receive() -> dict[str, object]:
        for piece in rest:
            return {"type": "http.request", "body": piece, "more_body": True}
        await asyncio.Event().wait()
        raise AssertionError

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def test_a_body_that_does_not_end_is_not_waited_for() -> None:
    reading = read_object(request([b'{"a":', b" "]), max_bytes=100, timeout_s=0.01)
    with pytest.raises(DeadlineExceededError, match=r"within 0\.01 seconds"):
        asyncio.run(reading)


@pytest.mark.parametrize("depth", [300, 100_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a":', "}")])
def test_a_nesting_bomb_is_no_json(left: str, right: str, depth: int) -> None:
    bomb = f'{{"x":{left * depth}0{right * depth}}}'.encode()
    with pytest.raises(InvalidRequestError, match="recursion limit") as error:
        parse_object(bomb)
    assert error.value.code == "invalid_json"
