"""JSON on the wire is one line to every client."""

from __future__ import annotations

import json

import pytest

from mtplx.server.responses import dump
from mtplx.server.sse import frame

TEXTS = [
    "plain",
    "é中🙂",
    "a\nb\r\nc",
    "\u2028 \u2029 \x85 \x0b \x0c \x1c",
    '"\\u2028"',
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_on_one_line(text: str) -> None:
    line = dump({"text": text}).decode()
    assert len(line.splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_what_people_write_is_not_escaped() -> None:
    assert dump("é中🙂") == '"é中🙂"'.encode()


def test_frame() -> None:
    assert frame({"a": "b\n\n"}) == b'data: {"a":"b\\n\\n"}\n\n'
