"""The events of an answer, from the pieces that the engine sends.

Decides what is text, reasoning and a call to the client (``mtplx.text.channels`` tells
them apart), gives calls their ids, and says how the answer ended. Which prompt it answers
is ``turn.py``'s business. Runs on the event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtplx.server.interfaces import ChannelParser
from mtplx.text.channels import Piece, Reasoning, Text
from mtplx.text.tool_calls import CallArguments, CallEnd, CallStart
from mtplx.types import Finished, PrefillProgress, TextDelta, TokenLogprob

TurnFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class TextPart:
    """A piece of the answer's text."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. ``index`` counts the calls of this answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class TurnEnd:
    """The last event.

    Attributes:
        reason: ``tool_calls`` only when every call is complete; ``length`` wins.
        finished: The engine's end, with metrics and counts.
        reasoning_tokens: Tokens of the answer that were reasoning.
        stop_sequence: The stop string that ended the answer, if one did.
    """

    reason: TurnFinishReason
    finished: Finished
    reasoning_tokens: int = 0
    stop_sequence: str | None = None


TurnEvent = (
    PrefillProgress | TextPart | ReasoningPart | ToolCallStart | ToolCallArguments | TurnEnd
)


class Answer:
    """What one answer has become so far, and its events.

    Args:
        parser: Made for its prompt.

    Attributes:
        token_ids: All that were sampled.
    """

    def __init__(self, parser: ChannelParser) -> None:
        self.token_ids: list[int] = []
        self._parser = parser
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        # Of tokens whose text has not come yet, by the part it will be in.
        self._said: list[TokenLogprob] = []
        self._thought: list[TokenLogprob] = []

    def add(self, delta: TextDelta) -> list[TurnEvent]:
        """Take in a piece, and return what it adds."""
        self.token_ids += delta.token_ids
        reasoned = self._parser.reasoning_tokens
        pieces = self._parser.push(delta.text, delta.token_ids)
        is_thought = self._parser.reasoning_tokens > reasoned
        (self._thought if is_thought else self._said).extend(delta.logprobs)
        return self._events(pieces)

    def end(self, finished: Finished) -> list[TurnEvent]:
        """Return the rest; the last event is the ``TurnEnd``."""
        truncated = finished.reason == "length" or finished.stop_text is not None
        events = self._events(self._parser.finish(truncated=truncated))
        reason: TurnFinishReason = "stop"
        if finished.reason == "length":
            reason = "length"
        elif self._calls and not self._parser.unfinished_call:
            reason = "tool_calls"
        reasoning_tokens = self._parser.reasoning_tokens
        return [*events, TurnEnd(reason, finished, reasoning_tokens, finished.stop_text)]

    def message(self) -> dict[str, Any]:
        """Return what has come so far, as the next turn's history has it."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._text)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [call.as_dict() for call in self._calls]
        return message

    def _events(self, pieces: Sequence[Piece]) -> list[TurnEvent]:
        return [event for piece in pieces if (event := self._event(piece)) is not None]

    def _event(self, piece: Piece) -> TurnEvent | None:
        match piece:
            case Text(text):
                self._text.append(text)
                return TextPart(text, _taken(self._said))
            case Reasoning(text):
                self._reasoning.append(text)
                return ReasoningPart(text, _taken(self._thought))
        self._said.clear()  # Those of a call are not the text's.
        match piece:
            case CallStart(name):
                self._calls.append(_Call(name))
                return ToolCallStart(len(self._calls) - 1, self._calls[-1].call_id, name)
            case CallArguments(text):
                self._calls[-1].arguments.append(text)
                return ToolCallArguments(len(self._calls) - 1, text)
            case CallEnd():
                return None


def _taken(logprobs: list[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    taken = tuple(logprobs)
    logprobs.clear()
    return taken


@dataclass
class _Call:
    """A tool call so far."""

    name: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")
    arguments: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}
