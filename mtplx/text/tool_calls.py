"""How a model writes tool calls, and reading them.

Decides what counts as a call. Calls in JSON are read while they are written, and their
arguments handed on byte for byte; every other format is read by mlx-lm's parser for it,
once the call is complete. Where calls stand in an answer is ``channels``' to find.
Pure; one reader for one answer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

Tool = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``."""

JSON_FORMAT = "json_tools"

# The special tokens that stand between the markers, by format.
_TOKENS_INSIDE = {
    "function_gemma": ("<escape>",),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "gemma4": ('<|"|>',),
    "kimi_k2": (
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    "mistral": ("[ARGS]",),
}
_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the call's arguments, which together are one JSON object."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete."""


CallPiece = CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls.

    Attributes:
        name: The format's name in mlx-lm.
        start: Marker before a call.
        end: Marker after it; empty where it ends with the answer or the next call.
        parse: ``parse(text between the markers, tools)`` returns one call or several,
            each with ``name`` and ``arguments``; raises whatever it likes.
        inside: Special tokens that ``parse`` looks for.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Sequence[Tool]], Any]
    inside: tuple[str, ...] = ()

    @property
    def is_json(self) -> bool:
        """A call is ``{"name": ..., "arguments": {...}}``."""
        return self.name == JSON_FORMAT


def _parse_json(text: str, tools: Sequence[Tool]) -> Any:
    return json.loads(text)


PLAIN_JSON = CallFormat(JSON_FORMAT, "<tool_call>", "</tool_call>", _parse_json)
"""For models that were not made for tools: what the prompt asks them to write."""


def read_call_format(wrapper: Any) -> CallFormat:
    """Return the format of the model behind mlx-lm's ``TokenizerWrapper``."""
    if not wrapper.has_tool_calling or wrapper.tool_parser is None:
        return PLAIN_JSON
    name = wrapper.tool_parser.__module__.rpartition(".")[2]
    return CallFormat(
        name=name,
        start=wrapper.tool_call_start,
        end=wrapper.tool_call_end or "",
        parse=wrapper.tool_parser,
        inside=_TOKENS_INSIDE.get(name, ()),
    )


def parse_calls(
    text: str, call_format: CallFormat, tools: Sequence[Tool]
) -> list[CallPiece] | None:
    """Read what stands between the markers; None if that is no call."""
    try:
        parsed = call_format.parse(text, tools)
        calls = parsed if isinstance(parsed, list) else [parsed]
        pieces = [piece for call in calls for piece in _whole_call(call)]
    except Exception as error:
        # The parsers are mlx-lm's and the text is the model's: there is no list of what
        # they may raise (ValueError, KeyError, SyntaxError, AttributeError, ...).
        _log.warning("A tool call could not be read (%s).", type(error).__name__)
        return None
    return pieces or None


def _whole_call(call: Mapping[str, Any]) -> tuple[CallPiece, ...]:
    name = call["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("its name is not a text")
    given = [call[key] for key in _ARGUMENT_KEYS if key in call]
    arguments = _object_text(given[0] if given else None)
    if arguments is None:
        raise ValueError("its arguments are not an object")
    return CallStart(name), CallArguments(arguments), CallEnd()


def _object_text(value: Any) -> str | None:
    """The JSON of an object that is given as one, or as its JSON; None if it is none."""
    if value is None or value == "":
        return "{}"
    if isinstance(value, str):
        return value if isinstance(json.loads(value), dict) else None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


class JsonCalls:
    """Reads the calls of one pair of markers from JSON that is still being written.

    Usually one object, or several, also in a list. Nothing is returned of an object
    that turns out to be no call.

    Args:
        end: The marker behind the calls. Its first character cannot stand in JSON,
            except in a string.

    Attributes:
        ended: That character was met. What follows is the marker, or no JSON.
    """

    def __init__(self, end: str) -> None:
        self._end_char = end[0]
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._calls = 0
        self.ended = False
        # The text of the present member: its key, then what of its value is not
        # returned yet.
        self._key: str | None = None
        self._member = ""
        # Of the present object. The arguments are those that are complete and not
        # returned yet; None before that.
        self._name: str | None = None
        self._arguments: str | None = None
        self._started = False

    @property
    def began(self) -> bool:
        """A piece of a call was returned."""
        return self._calls > 0 or self._started

    @property
    def unfinished(self) -> bool:
        """The text ends inside a call."""
        return self._depth > 0

    def push(self, text: str) -> tuple[list[CallPiece], int]:
        """Read on.

        Returns:
            What is certain now, and how many characters were read: all, or those
            before the end.
        """
        pieces: list[CallPiece] = []
        for index, char in enumerate(text):
            if not self._in_string and char == self._end_char:
                self.ended = True
                self._stream(pieces)
                return pieces, index
            self._read(char, pieces)
        self._stream(pieces)
        return pieces, len(text)

    def finish(self) -> list[CallPiece]:
        """End the text. Forgives a missing last brace when the arguments are there."""
        pieces: list[CallPiece] = []
        if self._depth == 1 and not self._in_string:
            self._end_member(pieces)
            if self._arguments is not None:
                self._end_object(pieces)
        return pieces

    def _read(self, char: str, pieces: list[CallPiece]) -> None:
        if self._in_string:
            self._member += char
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif self._depth == 0:
            # Commas and brackets of a list, whitespace.
            if char == "{":
                self._depth = 1
                self._name = self._arguments = None
        elif self._depth == 1 and char in ":,}" + _SPACE:
            if char == ":" and self._key is None:
                self._key, self._member = _string(self._member), ""
            elif char == ",":
                self._end_member(pieces)
            elif char == "}":
                self._end_member(pieces)
                self._end_object(pieces)
        else:
            self._member += char
            self._in_string = char == '"'
            # A bracket too many must not end the object.
            self._depth = max(1, self._depth + (char in "{[") - (char in "}]"))

    def _end_member(self, pieces: list[CallPiece]) -> None:
        self._stream(pieces)
        if self._key == "name" and self._name is None:
            self._name = _string(self._member)
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = "" if self._started else self._member
        self._key, self._member = None, ""

    def _stream(self, pieces: list[CallPiece]) -> None:
        """Return what is new of arguments that are being written."""
        if (
            self._key in _ARGUMENT_KEYS
            and self._arguments is None
            and self._name
            and (self._started or self._member.startswith("{"))
        ):
            if not self._started:
                pieces.append(CallStart(self._name))
                self._started = True
            if self._member:
                pieces.append(CallArguments(self._member))
                self._member = ""

    def _end_object(self, pieces: list[CallPiece]) -> None:
        self._depth = 0
        started, self._started = self._started, False
        if not started:
            arguments = _arguments_text(self._arguments)
            if not self._name or arguments is None:
                return
            pieces += CallStart(self._name), CallArguments(arguments)
        pieces.append(CallEnd())
        self._calls += 1


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _arguments_text(text: str | None) -> str | None:
    """The JSON object that a complete value is, or holds as a string."""
    if text is None:
        return "{}"
    if text.startswith("{"):
        return text
    try:
        return _object_text(json.loads(text))
    except ValueError:
        return None
