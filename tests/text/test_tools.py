"""Calls and results reach every template, in its own form or as text."""

from __future__ import annotations

import json
import logging

import pytest

from mtplx.errors import InvalidRequestError
from mtplx.text.tools import with_parsed_arguments, with_tools_as_text

from .tokenizers_factory import (
    ALTERNATING,
    CHATML,
    QWEN,
    assistant,
    call,
    make_tokenizer,
    result,
    system,
    tool,
    user,
)

TOOLS = [tool("read", path="string"), tool("list")]
TALK = [
    system("Be brief."),
    user("Read a and b."),
    assistant("Yes.", tool_calls=[call("read", '{"path":"a"}'), call("list", "")]),
    result("A"),
    result("B"),
]


def test_arguments_become_objects_and_the_given_messages_stay():
    before = json.dumps(TALK)
    calls = with_parsed_arguments(TALK)[2]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"path": "a"}, {}]
    assert json.dumps(TALK) == before
    parsed = [assistant("", tool_calls=[call("f", {"a": 1})])]
    assert with_parsed_arguments(parsed) == parsed


@pytest.mark.parametrize("arguments", ["{", "[1]", "1", "null", None, "[" * 100_000])
def test_arguments_that_are_no_object_are_refused_by_place(arguments):
    messages = [user("a"), assistant("", tool_calls=[call("f", arguments)])]
    with pytest.raises(InvalidRequestError, match="call to 'f'") as caught:
        make_tokenizer(template=QWEN).render_chat(messages)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"


def test_a_template_that_knows_tools_gets_them_as_they_are(caplog):
    prompt = make_tokenizer(template=QWEN).render_chat(TALK, tools=TOOLS)
    assert prompt.text.count('"name": "read"') == 2
    assert '{"name": "read", "arguments": {"path": "a"}}' in prompt.text
    assert "You can call" not in prompt.text
    assert not caplog.records


def test_a_template_without_tools_gets_them_as_text_and_says_so_once(caplog):
    tokenizer = make_tokenizer(template=CHATML)
    with caplog.at_level(logging.WARNING):
        tokenizer.render_chat([user("a")])
        assert not caplog.records
        prompt = tokenizer.render_chat(TALK, tools=TOOLS)
        tokenizer.render_chat(TALK, tools=TOOLS)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    head, question, answer, results, _ = prompt.text.split("<|im_start|>")[1:]
    assert head.startswith("system\nBe brief.\n\nYou can call these tools")
    listed = [json.loads(line) for line in head.splitlines() if line[:8] == '{"type":']
    assert listed == TOOLS
    assert question == "user\nRead a and b.<|im_end|>\n"
    assert answer == (
        'assistant\nYes.\n<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
        "<|im_end|>\n"
    )
    assert results == (
        "user\n<tool_response>\nA\n</tool_response>\n"
        "<tool_response>\nB\n</tool_response><|im_end|>\n"
    )


def test_without_a_system_message_the_tools_make_one():
    prompt = make_tokenizer().render_chat([user("a")], tools=TOOLS)
    assert prompt.text.startswith("<|im_start|>system\nYou can call these tools")
    assert len(prompt.edges) == 2


def test_calls_of_the_past_are_text_without_tools_of_now():
    messages, index_of = with_tools_as_text(with_parsed_arguments(TALK), [])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[0] == TALK[0]
    assert index_of == [0, 1, 2, 3, 3]
    assert "<tool_call>" in messages[2]["content"]


def test_results_take_one_turn_where_turns_must_alternate():
    prompt = make_tokenizer(template=ALTERNATING).render_chat(TALK, tools=TOOLS)
    assert prompt.text.count("[INST]") == 2


def test_an_edge_asked_for_follows_its_message_into_the_text():
    tokenizer = make_tokenizer()
    messages = [user("a"), *TALK[2:], assistant("ok"), *[user("b"), assistant("c")] * 3]
    usual = tokenizer.render_chat(messages, tools=TOOLS)
    asked = tokenizer.render_chat(messages, tools=TOOLS, edge_after=[2])
    (char,) = set(asked.edge_chars) - set(usual.edge_chars)
    assert asked.text[:char].endswith("B\n</tool_response><|im_end|>\n")
