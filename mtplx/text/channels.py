"""Reasoning, text and tool calls of an answer, told apart while it is written.

Decides which part of an answer is what, and what of it is shown: markers never are, nor
the whitespace around them, which the template writes for the model and no client wants
to strip. Whitespace elsewhere stays. Reading calls is ``tool_calls``'; finding markers
that are cut into pieces is done by ``stop``'s matcher. Pure; one parser for one answer.

A marker counts wherever the model writes it, except in a JSON string of a call: there it
is the string's content. Stop strings are the engine's, and end an answer in any channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplx.text.plain_tools import plain_tools
from mtplx.text.stop import StopMatcher
from mtplx.text.tool_calls import (
    PLAIN_JSON,
    CallFormat,
    CallPiece,
    JsonCalls,
    Tool,
    parse_calls,
    read_call_format,
)

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Text:
    """A piece of what the user is to read."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


Piece = Text | Reasoning | CallPiece


@dataclass(frozen=True)
class AnswerFormat:
    """How a model's answers are laid out.

    Attributes:
        think: Markers around reasoning; None from a model that does not reason.
        calls: How tool calls are written.
        silent: Markers that only structure an answer.
        tokens: Tokens of the vocabulary that stand whole in a marker or a call, and
            their ids.
    """

    think: tuple[str, str] | None
    calls: CallFormat
    silent: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)

    def opens_reasoning(self, header: str) -> bool:
        """Whether an answer behind ``header``, the end of its prompt, begins inside
        reasoning: the template has opened it, or the answer continues one."""
        if self.think is None:
            return False
        start, end = self.think
        return header.rfind(start) > header.rfind(end)


def read_answer_format(wrapper: Any, *, knows_tools: bool = True) -> AnswerFormat:
    """Return the format of the model behind mlx-lm's ``TokenizerWrapper``.

    Args:
        wrapper: Of a tokenizer.
        knows_tools: The chat template writes tools and calls. Where it does not, the
            prompt asks for plain JSON.
    """
    calls = read_call_format(wrapper) if knows_tools else PLAIN_JSON
    think = (wrapper.think_start, wrapper.think_end) if wrapper.has_thinking else None
    silent = tuple(wrapper.structural_markers)
    written = (*(think or ()), calls.start, calls.end, *calls.inside, *silent)
    return AnswerFormat(
        think=think,
        calls=calls,
        silent=silent,
        tokens={
            token: token_id
            for token, token_id in wrapper.get_added_vocab().items()
            if any(token in marker for marker in written)
        },
    )


class ChannelParser:
    """Tells the channels of one answer apart.

    Args:
        answer_format: The model's.
        tools: What the answer may call; without any, markers of calls are text.
        reasoning: The answer begins inside reasoning.

    Attributes:
        reasoning_tokens: Tokens that came while the model was reasoning, its markers
            included.
        unfinished_call: A call was begun and never ended.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        *,
        tools: Sequence[Tool] = (),
        reasoning: bool = False,
    ) -> None:
        self._format = answer_format
        self._tools = plain_tools(tools)
        self.reasoning_tokens = 0
        self.unfinished_call = False
        self._channel: type[Text] | type[Reasoning] = Reasoning if reasoning else Text
        # What was written of the present call; None outside of calls.
        self._call: list[str] | None = None
        self._json: JsonCalls | None = None
        # Whitespace that is shown only where text follows it, not a marker.
        self._space = ""
        self._after_marker = reasoning
        self._watch()

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """Add a piece of the answer and return what is now certain.

        Args:
            text: May be empty.
            token_ids: The tokens it came with, for ``reasoning_tokens``.
        """
        reasoned = self._channel is Reasoning
        pieces: list[Piece] = []
        self._read(text, pieces)
        if reasoned or self._channel is Reasoning:
            self.reasoning_tokens += len(token_ids)
        return pieces

    def finish(self, *, truncated: bool = False) -> list[Piece]:
        """End the answer and return the rest.

        Args:
            truncated: The answer was cut off, by a token limit say: a call that lacks
                its end is not read. Otherwise the model has ended it so.
        """
        pieces: list[Piece] = []
        self._say(self._matcher.flush(), pieces)
        while self._matcher.stopped:
            self._read(self._pass_marker(pieces), pieces)
            self._say(self._matcher.flush(), pieces)
        if self._call is not None:
            self._end_call(pieces, truncated=truncated)
        if self._space and self._channel is Text:
            pieces.append(Text(self._space))
        return pieces

    def _read(self, text: str, pieces: list[Piece]) -> None:
        while text:
            if self._json is not None and not self._json.ended:
                new, count = self._json.push(text)
                pieces += new
                self._say(text[:count], pieces)
                text = text[count:]
            else:
                self._say(self._matcher.push(text), pieces)
                text = self._pass_marker(pieces) if self._matcher.stopped else ""

    def _say(self, text: str, pieces: list[Piece]) -> None:
        """Add text without markers to the present channel."""
        if self._call is not None:
            self._call.append(text)
            return
        if self._after_marker:
            text = text.lstrip(_SPACE)
            self._after_marker = not text
        if self._markers:
            text = self._space + text
            kept = text.rstrip(_SPACE)
            self._space, text = text[len(kept) :], kept
        if text:
            pieces.append(self._channel(text))

    def _pass_marker(self, pieces: list[Piece]) -> str:
        """Go on behind the marker that was found, and return the text there."""
        marker, rest = self._matcher.stop_text, self._matcher.rest
        calls, think = self._format.calls, self._format.think
        in_call = self._call is not None
        if in_call:
            self._end_call(pieces, truncated=False)
        if marker == calls.start:
            self._call = []
            self._json = JsonCalls(calls.end) if calls.is_json else None
        elif not in_call:
            self._drop_space()
            if think is not None and marker in think:
                self._channel = Reasoning if marker == think[0] else Text
        self._watch()
        return rest

    def _drop_space(self) -> None:
        """Here is a marker: whitespace before it and behind it is not shown."""
        self._space, self._after_marker = "", True

    def _watch(self) -> None:
        """Look for the markers that mean something from here on."""
        calls = self._format.calls
        if self._call is not None:
            self._markers = [calls.end or calls.start]
        else:
            self._markers = [*(self._format.think or ()), *self._format.silent]
            if self._tools:
                self._markers += filter(None, (calls.start, calls.end))
        self._matcher = StopMatcher(self._markers)

    def _end_call(self, pieces: list[Piece], *, truncated: bool) -> None:
        assert self._call is not None
        text, json_calls = "".join(self._call), self._json
        self._call, self._json, self._channel = None, None, Text
        if json_calls is not None:
            # What was returned of them stands, however they end.
            if not truncated:
                pieces += json_calls.finish()
            if truncated or json_calls.began:
                self.unfinished_call |= json_calls.unfinished or not json_calls.began
                self._drop_space()
                return
        # A format without an end marker has no other way to end than the answer's.
        cut = truncated and bool(self._format.calls.end)
        calls = None if cut else parse_calls(text, self._format.calls, self._tools)
        if calls is None and not truncated:
            self._say(text.strip(_SPACE), pieces)
            return
        pieces += calls or ()
        self.unfinished_call |= calls is None
        self._drop_space()
