"""Tool calls in messages, as chat templates read them.

Decides how a conversation with tools is put to a model whose template has no place for
them: the tools stand as JSON at the end of the system message, with how to call them, and
calls and their results stand in the text of assistant and user messages. Reading calls
out of an answer is ``tool_calls``. Pure; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mtplx.errors import InvalidRequestError
from mtplx.text.tool_calls import PLAIN_JSON

_CALL_OPEN, _CALL_CLOSE = PLAIN_JSON.start, PLAIN_JSON.end
_RESULT_OPEN, _RESULT_CLOSE = "<tool_response>", "</tool_response>"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}

Message = Mapping[str, Any]


def with_parsed_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies of the messages, the arguments of their calls as objects.

    Raises:
        InvalidRequestError: Arguments are not the JSON of an object.
    """
    parsed = []
    for index, message in enumerate(messages):
        message = dict(message)
        if message.get("tool_calls"):
            message["tool_calls"] = [
                _with_parsed_arguments(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(message["tool_calls"])
            ]
        parsed.append(message)
    return parsed


def knows_tools(apply_chat_template: Callable[..., str]) -> bool:
    """Whether a template writes the tools it is given; one that refuses the question
    counts, since the real conversation will show."""
    messages = [{"role": "user", "content": "x"}]
    try:
        plain, with_tools = (
            apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **more
            )
            for more in ({}, {"tools": [_PROBE_TOOL]})
        )
    except Exception:
        # Templates raise whatever they like.
        return True
    return plain != with_tools


def speaks_of_tools(messages: Sequence[Message]) -> bool:
    """True when a message holds a call or the result of one."""
    return any(m.get("role") == "tool" or m.get("tool_calls") for m in messages)


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[int]]:
    """Write tools, calls and results into the text of ordinary messages.

    Results that follow each other become one user message, since many templates want
    users and assistants to take turns.

    Args:
        messages: With their arguments parsed.
        tools: May be empty: then only the messages are rewritten.

    Returns:
        The messages, and for each of the given ones the index of the one it is in.
    """
    plain: list[dict[str, Any]] = []
    index_of = []
    if tools and not (messages and messages[0].get("role") in ("system", "developer")):
        plain.append({"role": "system", "content": _instruction(tools)})
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        if is_result and after_result:
            plain[-1]["content"] += "\n" + _result(message)
        elif is_result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls_as_text(message))
        if tools and len(plain) == 1:
            plain[0]["content"] = _joined(plain[0]["content"], "\n\n", _instruction(tools))
        after_result = is_result
        index_of.append(len(plain) - 1)
    return plain, index_of


def _with_parsed_arguments(call: Mapping[str, Any], param: str) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(
            f"The arguments of the call to {function.get('name')!r} are not a JSON object. "
            'Send them as JSON text, "{}" for none.',
            param=f"{param}.function.arguments",
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(arguments: str) -> Any:
    if not arguments.strip():
        # Some clients send nothing for a call without arguments.
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return None


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, described as JSON, one on a line:\n{lines}\n\n"
        "To call one, answer with its name and its arguments in this form, once for each "
        f'call:\n{_CALL_OPEN}\n{{"name": <name>, "arguments": <object>}}\n{_CALL_CLOSE}\n'
        f"What it returns will come between {_RESULT_OPEN} and {_RESULT_CLOSE}."
    )


def _with_calls_as_text(message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text = "\n".join(
        f"{_CALL_OPEN}\n"
        + json.dumps(
            {"name": call["name"], "arguments": call["arguments"]}, ensure_ascii=False
        )
        + f"\n{_CALL_CLOSE}"
        for call in calls
    )
    if text:
        plain["content"] = _joined(plain.get("content"), "\n", text)
    return plain


def _result(message: Message) -> str:
    return f"{_RESULT_OPEN}\n{message.get('content') or ''}\n{_RESULT_CLOSE}"


def _joined(text: str | None, between: str, more: str) -> str:
    return f"{text}{between}{more}" if text else more
