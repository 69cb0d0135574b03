"""Grammars of tool calls, in the form that the model writes them.

Decides what of a call can be enforced in which format. Where all arguments are one JSON
object: everything. Where each argument stands between tags (as Qwen3-Coder, GLM and
MiniMax write them): the names, which arguments there are and their values by their
schemas, except that a string is any text, or one of an ``enum``. Other formats are
refused where a call must be right. Reasoning and answers without calls are ``grammar``'s.
Pure; any thread, but slow: not the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtplx.errors import InvalidRequestError, UnsupportedFieldError
from mtplx.text.channels import AnswerFormat
from mtplx.text.lark import FREE_TEXT, Tokens, check, lark_text, literal, until
from mtplx.text.plain_tools import plain_property
from mtplx.text.schema import prepare_schema
from mtplx.text.tool_calls import JSON_FORMAT, Tool


@dataclass(frozen=True)
class _Frame:
    """What stands around the name and the arguments, between a call's markers.

    Attributes:
        before, between, after: The name stands after the first, the arguments after the
            second.
        argument: What stands before each key, between it and its value, and after that;
            None where all arguments are one JSON object.
        apart: What stands between two calls.
    """

    before: str
    between: str
    after: str
    argument: tuple[str, str, str] | None = None
    apart: str = "\n"


_FRAMES = {
    JSON_FORMAT: _Frame('\n{"name": "', '", "arguments": ', "}\n"),
    "mistral": _Frame("", "[ARGS]", "", apart=""),
    "qwen3_coder": _Frame(
        "\n<function=",
        ">\n",
        "</function>\n",
        ("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "minimax_m2": _Frame(
        '\n<invoke name="',
        '">\n',
        "</invoke>\n",
        ('<parameter name="', '">', "</parameter>\n"),
    ),
    "glm47": _Frame("", "", "", ("<arg_key>", "</arg_key><arg_value>", "</arg_value>")),
}
# What the schema of one argument needs of the whole.
_SHARED = ("$defs", "definitions", "x-guidance")
# Of a string between tags.
_NOT_ENFORCED = ("pattern", "format", "minLength", "maxLength")


def forced_calls(
    tools: Sequence[Tool],
    answer_format: AnswerFormat,
    *,
    name: str | None = None,
    parallel: bool = True,
) -> str:
    """Return the grammar of an answer that is calls, at least one, and nothing else.

    Args:
        tools: What may be called.
        answer_format: The model's.
        name: Call only this one.
        parallel: More than one call may be made.

    Raises:
        InvalidRequestError: No tool has the name, or a strict tool's parameters cannot
            be enforced.
        UnsupportedFieldError: Calls of this format cannot be enforced.
    """
    numbered = [
        (index, tool)
        for index, tool in enumerate(tools)
        if name is None or tool["function"]["name"] == name
    ]
    if not numbered:
        raise InvalidRequestError(
            f"`tool_choice` asks for a call of {name or 'a tool'}, and there is no such "
            "tool. Choose from `tools`.",
            param="tool_choice",
        )
    frame = _frame(answer_format, "`tool_choice` auto or none", "tool_choice")
    calls, tokens = answer_format.calls, answer_format.tokens
    repeated = f"({literal(frame.apart + calls.start, tokens)} call)*" if parallel else ""
    return _grammar(
        f"start: {literal(calls.start, tokens)} call {repeated}",
        *_call(numbered, frame, answer_format),
    )


def strict_calls(
    tools: Sequence[Tool], answer_format: AnswerFormat, *, parallel: bool = True
) -> str | None:
    """Return the grammar of any text in which every call is right; None where no tool
    is strict.

    Raises:
        InvalidRequestError: A strict tool's parameters cannot be enforced.
        UnsupportedFieldError: A tool is strict, and calls of this format cannot be
            enforced.
    """
    strict = [index for index, tool in enumerate(tools) if _is_strict(tool)]
    if not strict:
        return None
    param = f"tools[{strict[0]}].function.strict"
    frame = _frame(answer_format, "tools without `strict`", param)
    return _grammar(
        # Behind its only call an answer ends: text there could open another.
        "start: (opening call)* TEXT?" if parallel else "start: TEXT? | opening call",
        *until("opening", answer_format.calls.start, answer_format.tokens),
        *_call(list(enumerate(tools)), frame, answer_format),
    )


def _frame(answer_format: AnswerFormat, instead: str, param: str) -> _Frame:
    name = answer_format.calls.name
    if name not in _FRAMES:
        raise UnsupportedFieldError(
            f"This model writes tool calls in a format ({name}) that cannot be enforced. "
            f"Use {instead}.",
            param=param,
        )
    return _FRAMES[name]


def _grammar(*rules: str) -> str:
    grammar = lark_text("\n".join([*rules, FREE_TEXT]))
    error, _ = check(grammar)
    if error:
        raise InvalidRequestError(
            f"The tools together cannot be enforced: {error[:200]}. Send fewer or simpler "
            "ones.",
            param="tools",
        )
    return grammar


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _call(
    tools: Sequence[tuple[int, Tool]], frame: _Frame, answer_format: AnswerFormat
) -> Iterator[str]:
    """Rules for what comes after a call's first marker, to its last.

    Args:
        tools: With their places in the request.
    """
    tokens = answer_format.tokens
    choices = " | ".join(f"call_{index}" for index, _ in tools)
    after = literal(frame.after + answer_format.calls.end, tokens)
    yield f"call: {literal(frame.before, tokens)} ({choices}) {after}"
    for index, tool in tools:
        rule, param = f"call_{index}", f"tools[{index}].function.parameters"
        head = literal(tool["function"]["name"] + frame.between, tokens)
        schema = _parameters(tool, param)
        if frame.argument is None:
            yield f"{rule}: {head} %json {json.dumps(schema)}"
            continue
        required = schema.get("required", ())
        arguments = []
        for number, (key, part) in enumerate(schema.get("properties", {}).items()):
            plain = plain_property(part, schema)
            if _is_strict(tool):
                _check_between_tags(key, plain, param)
            yield from _argument(
                f"{rule}_{number}", key, plain, schema, frame.argument, tokens
            )
            arguments.append(f"{rule}_{number}" + ("" if key in required else "?"))
        yield f"{rule}: {head} {' '.join(arguments)}"


def _parameters(tool: Tool, param: str) -> dict[str, Any]:
    """The schema of a call's arguments, ready for llguidance. Of a tool that is not
    strict, what cannot be enforced is not."""
    schema = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    if _is_strict(tool):
        if isinstance(schema, Mapping) and schema.get("type", "object") != "object":
            raise InvalidRequestError(
                "The parameters of a tool are an object. Send a schema of that type.",
                param=param,
            )
        return prepare_schema({"type": "object", **schema}, param=param)
    try:
        prepared = prepare_schema({"type": "object", **schema}, strict=False, param=param)
        if prepared["type"] == "object":
            return prepared
    except (InvalidRequestError, TypeError):
        pass
    return prepare_schema(_names_only(schema), param=param)


def _names_only(schema: Any) -> dict[str, Any]:
    schema = schema if isinstance(schema, Mapping) else {}
    names, required = schema.get("properties"), schema.get("required")
    names = list(names) if isinstance(names, Mapping) else []
    return {
        "type": "object",
        "properties": {name: {} for name in names},
        "required": [n for n in names if isinstance(required, list) and n in required],
        "additionalProperties": True,
    }


def _argument(
    rule: str,
    key: str,
    plain: Mapping[str, Any],
    schema: Mapping[str, Any],
    tags: tuple[str, str, str],
    tokens: Tokens,
) -> Iterator[str]:
    """Rules for one argument between its tags; the first is ``rule``.

    Args:
        plain: What ``plain_property`` makes of the argument's schema.
        schema: Of all arguments.
    """
    before, between, after = tags
    head = literal(before + key + between, tokens)
    # A value of any type is text too: the parsers take what is JSON as JSON.
    if plain and plain.get("type") != "string":
        shared = {name: schema[name] for name in _SHARED if name in schema}
        value = json.dumps(shared | schema["properties"][key])
        yield f"{rule}: {head} %json {value} {literal(after, tokens)}"
    elif "enum" in plain:
        texts = [text for text in plain["enum"] if isinstance(text, str)]
        values = " | ".join(literal(text + after, tokens) for text in texts)
        yield f"{rule}: {head} ({values})"
    else:
        yield f"{rule}: {head} {rule}_text"
        yield from until(f"{rule}_text", after, tokens)


def _check_between_tags(key: str, plain: Mapping[str, Any], param: str) -> None:
    lost = [
        word for word in _NOT_ENFORCED if word in plain and plain.get("type") == "string"
    ]
    if not isinstance(plain.get("type"), str):
        lost = ["a choice of types"]
    if lost:
        raise InvalidRequestError(
            f"This model writes arguments as text between tags, where {lost[0]} of "
            f"{key!r} cannot be enforced. Leave it out, or `strict`.",
            param=param,
        )
