"""What of an answer becomes which block."""

from __future__ import annotations

from typing import Any

import pytest

from mtplx.metrics import PrefillClock
from mtplx.server.messages.events import Answer
from mtplx.server.turn import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
)
from mtplx.types import Finished, FinishReason, PrefillProgress


def end(
    reason: Any = "stop", completion_tokens: int = 3, stop_sequence: str | None = None
) -> TurnEnd:
    clock = PrefillClock(10, 0.0)
    clock.computed(10, 0.1)
    finish: FinishReason = "length" if reason == "length" else "stop"
    finished = Finished(finish, completion_tokens, clock.metrics())
    return TurnEnd(reason, finished, stop_sequence=stop_sequence)


def run(*events: TurnEvent, max_tokens: int = 10) -> tuple[list[dict[str, Any]], Any]:
    """Return the events of the stream, and the whole answer."""
    answer = Answer("msg_1", "claude-any", max_tokens)
    sent = [each for event in events for each in answer.push(event)]
    last = events[-1]
    assert isinstance(last, TurnEnd)
    return sent, answer.whole(last)


def test_space_before_the_first_word_waits_for_it() -> None:
    sent, whole = run(TextPart("\n"), TextPart(" "), TextPart("Yes"), TextPart("\n"), end())
    deltas = [each["delta"]["text"] for each in sent if "index" in each and "delta" in each]
    assert deltas == ["\n Yes", "\n"]
    assert whole["content"] == [{"type": "text", "text": "\n Yes\n"}]


def test_space_alone_is_no_block() -> None:
    sent, whole = run(
        TextPart("\n\n"), ToolCallStart(0, "c", "f"), TextPart("\n"), end("tool_calls")
    )
    assert [block["type"] for block in whole["content"]] == ["tool_use"]
    assert [each["type"] for each in sent] == [
        "content_block_start", "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


def test_an_answer_of_nothing() -> None:
    sent, whole = run(PrefillProgress(0, 0, 10), TextPart(""), ReasoningPart(""), end())
    assert [each["type"] for each in sent] == ["message_delta", "message_stop"]
    assert (whole["content"], whole["stop_reason"]) == ([], "end_turn")


def test_a_block_for_each_change_of_kind() -> None:
    _, whole = run(
        TextPart("a"), ReasoningPart("b"), ReasoningPart("c"), TextPart("d"), end()
    )
    assert [block["type"] for block in whole["content"]] == ["text", "thinking", "text"]
    assert whole["content"][1]["thinking"] == "bc"


def test_indices_count_blocks() -> None:
    sent, _ = run(
        ReasoningPart("a"), TextPart("b"), ToolCallStart(0, "c", "f"),
        ToolCallArguments(0, "{}"), ToolCallStart(1, "d", "f"), end("tool_calls"),
    )  # fmt: skip
    starts = [each["index"] for each in sent if each["type"] == "content_block_start"]
    stops = [each["index"] for each in sent if each["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("pieces", "arguments"),
    [
        ([], {}),
        (['{"a"', ": 1}"], {"a": 1}),
        (['{"a": 1, "b": "x'], {"a": 1, "b": "x"}),
        (["[1]"], {}),
        (["nonsense"], {}),
    ],
)
def test_arguments(pieces: list[str], arguments: dict[str, Any]) -> None:
    parts = [ToolCallArguments(0, piece) for piece in pieces]
    _, whole = run(ToolCallStart(0, "c", "f"), *parts, end("length"))
    assert whole["content"][0]["input"] == arguments


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (end(), ("end_turn", None)),
        (end(stop_sequence="END"), ("stop_sequence", "END")),
        (end("length", completion_tokens=10), ("max_tokens", None)),
        (end("length", completion_tokens=9), ("model_context_window_exceeded", None)),
        (end("tool_calls"), ("tool_use", None)),
    ],
)
def test_why_it_ended(last: TurnEnd, expected: tuple[str, str | None]) -> None:
    sent, whole = run(TextPart("x"), last)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    delta = sent[-2]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected
