"""What Anthropic's blocks mean as a chat."""

from __future__ import annotations

from typing import Any

import pytest

from mtplx.errors import InvalidRequestError
from mtplx.server.body import validate
from mtplx.server.messages.body import MessagesBody
from mtplx.server.messages.thinking import signature
from mtplx.server.messages.translate import answer_request
from mtplx.server.turn import ToolChoice, TurnRequest

USER = {"role": "user", "content": "Hello"}
TOOL = {"name": "f", "description": "Does it.", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "é"}}
MARK = {"cache_control": {"type": "ephemeral"}}


def asked(**fields: Any) -> TurnRequest:
    body = {"model": "claude-x", "max_tokens": 5, "messages": [USER], **fields}
    return answer_request(validate(body, MessagesBody))


def chat(*messages: dict[str, Any], **fields: Any) -> list[Any]:
    return list(asked(messages=list(messages), **fields).messages)


def said(role: str, *content: Any) -> dict[str, Any]:
    """A message of blocks; strings are text."""
    blocks = [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]
    return {"role": role, "content": blocks}


def result(content: Any = "Done.", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **fields}


def test_the_system_prompt_comes_first() -> None:
    assert chat(USER, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    blocks = said("system", "One.", "Two.")["content"]
    assert chat(USER, system=blocks)[0]["content"] == "One.\n\nTwo."


def test_late_system_messages_stay_in_place() -> None:
    roles = [m["role"] for m in chat(USER, said("system", "Now."), said("user", "Go."))]
    assert roles == ["user", "system", "user"]


def test_messages_of_one_role_become_one() -> None:
    assert chat(USER, said("user", "More", "text")) == [
        {"role": "user", "content": "Hello\n\nMore\n\ntext"}
    ]
    answer = chat(USER, said("assistant", "Hel", "lo."), said("assistant", " You."))[1]
    assert answer == {"role": "assistant", "content": "Hello. You."}


def test_calls_and_results() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "of another server"}
    hidden = {"type": "redacted_thinking", "data": "xyz"}
    assert chat(
        USER,
        said("assistant", thought, hidden, "I look.", CALL),
        said("user", result([{"type": "text", "text": "Do"}]), "And now?"),
    )[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": "é"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "f", "content": "Do"},
        {"role": "user", "content": "And now?"},
    ]


def test_a_failed_call_says_so() -> None:
    history = chat(USER, said("assistant", CALL), said("user", result(is_error=True)))
    assert history[2]["content"] == "Error: Done."


def test_a_result_without_content() -> None:
    history = chat(USER, said("assistant", CALL), said("user", result([])))
    assert history[2]["content"] == ""


def test_a_result_needs_its_call() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        asked(messages=[said("user", "Hi", result())])
    assert caught.value.param == "messages[0].content[1].tool_use_id"


def test_thinking_in_a_signature() -> None:
    def thought(signed: str) -> Any:
        block = {"type": "thinking", "thinking": "", "signature": signed}
        return chat(USER, said("assistant", block, "Yes."))[1].get("reasoning_content")

    assert thought(signature("Grübel.", shown=False)) == "Grübel."
    assert thought(signature("Grübel.", shown=True)) == ""
    assert thought("mtplx-text-no base64") == ""
    assert thought("mtplx-text-/w==") == ""


def test_tools() -> None:
    request = asked(tools=[{**TOOL, "strict": True}, {**TOOL, "name": "g"}])
    assert request.tools[0] == {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Does it.",
            "parameters": {"type": "object"},
            "strict": True,
        },
    }
    assert "strict" not in request.tools[1]["function"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ToolChoice()),
        ({"type": "any"}, ToolChoice("required")),
        ({"type": "tool", "name": "f"}, ToolChoice("required", "f")),
        ({"type": "none"}, ToolChoice("none")),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: ToolChoice) -> None:
    request = asked(tools=[TOOL], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, True)
    once = {**choice, "disable_parallel_tool_use": True}
    assert not asked(tools=[TOOL], tool_choice=once).parallel_tool_calls


@pytest.mark.parametrize(
    ("fields", "thinks", "effort"),
    [
        ({}, None, None),
        ({"thinking": {"type": "adaptive"}}, True, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, "medium"),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            False,
            None,
        ),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            True,
            "high",
        ),
        ({"output_config": {"effort": "low"}}, True, "low"),
    ],
)
def test_thinking_is_a_variable_of_the_template(
    fields: dict[str, Any], thinks: bool | None, effort: str | None
) -> None:
    kwargs = asked(**fields).template_kwargs
    assert (kwargs.get("enable_thinking"), kwargs.get("reasoning_effort")) == (
        thinks, effort,
    )  # fmt: skip


def test_a_last_message_of_the_model_is_continued() -> None:
    assert not asked().continue_final_message
    assert asked(messages=[USER, said("assistant", "The")]).continue_final_message
    assert asked(messages=[USER, said("assistant", "")]) == asked()
    assert asked(messages=[USER, said("assistant")]) == asked()
    with pytest.raises(InvalidRequestError, match="tool_result"):
        asked(messages=[USER, said("assistant", CALL)])


def test_messages_without_content_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        asked(messages=[said("user")])


def test_marks_become_edges() -> None:
    history = [
        said("user", "a", {"type": "text", "text": "b", **MARK}),
        said("assistant", "c", {**CALL, **MARK}),
        said("user", {**result(), **MARK}, "d"),
    ]
    assert asked(messages=history).edge_after == (0, 1, 2)
    assert asked(messages=history, system="s").edge_after == (1, 2, 3)
    inside = result([{"type": "text", "text": "e", **MARK}])
    assert asked(messages=[*history[:2], said("user", inside)]).edge_after == (0, 1, 2)
    assert asked(**MARK).edge_after == (0,)
    assert asked().edge_after == ()


@pytest.mark.parametrize("nest", [True, False])
def test_the_schema_of_the_answer(nest: bool) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    fields = {"output_config": {"format": form}} if nest else {"output_format": form}
    assert asked(**fields).grammar is not None
    assert asked().grammar is None
