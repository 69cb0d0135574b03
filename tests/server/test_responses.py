"""JSON on the wire is one line to every client."""

from __future__ import annotations

import json

import pytest

from mtplx.metrics import PrefillClock, StreamMetrics
from mtplx.server.access import RequestRecord
from mtplx.server.responses import dump, report
from mtplx.server.sse import frame
from mtplx.types import Finished

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


def finished(misses: int) -> Finished:
    clock = PrefillClock(prompt_tokens=5, arrival_s=0.0, end_s=1.0)
    clock.computed(5, 1.0)
    stream = StreamMetrics(
        itl_target_s=0.25,
        itl_p50_s=0.1,
        itl_p99_s=0.4,
        itl_worst_s=0.5,
        itl_misses=misses,
        stall_suffered_s=1.5,
        stall_caused_s=0.0,
    )
    return Finished("stop", 3, clock.metrics(), stream)


def test_a_report_tells_of_the_prompt_and_of_the_gaps() -> None:
    told = report(finished(misses=2))
    assert told["prompt_tokens"] == 5
    assert (told["itl_target_s"], told["itl_p99_s"], told["itl_misses"]) == (0.25, 0.4, 2)
    assert (told["stall_suffered_s"], told["stall_caused_s"]) == (1.5, 0.0)


@pytest.mark.parametrize(("misses", "said"), [(0, False), (2, True)])
def test_the_log_says_by_how_much_a_target_was_missed(misses: int, said: bool) -> None:
    end = finished(misses)
    record = RequestRecord(metrics=end.metrics, stream=end.stream)
    line = record.line("POST", "/v1/chat/completions")
    assert "itl_p99=0.400s" in line
    assert ("itl_target=0.250s missed=2" in line) is said
