"""Tools and reasoning on the wire of chats, read by the OpenAI SDK's own types."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.server.conftest import INFO, Server
from tests.server.fakes import FakeEngine, word_id

USER = [{"role": "user", "content": "Weather in Rome and Oslo?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = (
    "<think>",
    "two ",
    "cities",
    "</think>",
    "Let me see. ",
    "<call weather>",
    '{"city": ',
    '"Rome"}',
    "</call>",
    "<call weather>",
    '{"city": "Oslo"}',
    "</call>",
)
ARGUMENTS = ['{"city": "Rome"}', '{"city": "Oslo"}']


def ask(openai: OpenAI, **fields: Any) -> Any:
    fields = {"model": INFO.name, "messages": USER, "tools": [WEATHER]} | fields
    return openai.chat.completions.create(**fields)


def test_calls_and_reasoning_are_not_text(engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = CALLS
    answer = ask(openai)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see. "
    assert choice.message.reasoning_content == "two cities"
    assert [call.function.arguments for call in choice.message.tool_calls] == ARGUMENTS
    assert {call.function.name for call in choice.message.tool_calls} == {"weather"}
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    assert answer.usage.completion_tokens == len(CALLS)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4


def test_a_message_of_calls_alone_has_no_content(
    engine: FakeEngine, http: httpx.Client
) -> None:
    engine.answer = CALLS[5:9]
    body = {"messages": USER, "tools": [WEATHER]}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["content"] is None
    assert set(message) == {"role", "content", "refusal", "tool_calls"}
    [call] = message["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["function"] == {"name": "weather", "arguments": ARGUMENTS[0]}


def test_deltas_of_calls_come_as_they_are_written(
    engine: FakeEngine, openai: OpenAI
) -> None:
    engine.answer = CALLS
    choices = [chunk.choices[0] for chunk in ask(openai, stream=True)]
    assert "".join(c.delta.content or "" for c in choices) == "Let me see. "
    reasoning = [getattr(c.delta, "reasoning_content", None) for c in choices]
    assert [piece for piece in reasoning if piece] == ["two ", "cities"]
    deltas = [c.delta.tool_calls[0] for c in choices if c.delta.tool_calls]
    assert [d.index for d in deltas] == [0, 0, 0, 1, 1]
    assert [d.type for d in deltas] == ["function", None, None, "function", None]
    assert [d.function.name for d in deltas] == ["weather", None, None, "weather", None]
    assert [d.id is not None for d in deltas] == [True, False, False, True, False]
    assert deltas[0].function.arguments == ""
    assert [d.function.arguments for d in deltas[1:3]] == ['{"city": ', '"Rome"}']
    assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("limit", [7, 8, 10])
def test_length_wins_over_a_call(engine: FakeEngine, openai: OpenAI, limit: int) -> None:
    engine.answer = CALLS
    answer = ask(openai, max_tokens=limit)
    assert answer.choices[0].finish_reason == "length"
    chunks = list(ask(openai, max_tokens=limit, stream=True))
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_call_that_breaks_off_is_no_call(engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = CALLS[5:7]
    assert ask(openai).choices[0].finish_reason == "stop"


def test_history_of_calls_reaches_the_template(server: Server, openai: OpenAI) -> None:
    server.engine.answer = CALLS
    message = ask(openai).choices[0].message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        for call in message["tool_calls"]
    ]
    ask(openai, messages=[*USER, message, *results])
    _, told, *answers = server.tokenizer.messages
    assert told == {
        "role": "assistant",
        "content": "Let me see. ",
        "reasoning_content": "two cities",
        "tool_calls": message["tool_calls"],
    }
    assert answers == results
    assert server.tokenizer.tools == [WEATHER]


def test_the_answer_is_remembered_with_its_tokens(server: Server, openai: OpenAI) -> None:
    server.engine.answer = CALLS
    sent = ask(openai).choices[0].message
    [(prompt, token_ids, message)] = server.tokenizer.remembered
    assert prompt == server.engine.requests[0].prompt
    assert token_ids == tuple(word_id(word) for word in CALLS)
    assert message["content"] == sent.content
    assert message["reasoning_content"] == sent.reasoning_content
    assert [call["id"] for call in message["tool_calls"]] == [
        call.id for call in sent.tool_calls
    ]


def test_a_choice_of_none_shows_no_tools(server: Server, openai: OpenAI) -> None:
    ask(openai, tool_choice="none")
    assert server.tokenizer.tools == []


def test_content_may_be_absent_beside_calls(http: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ({}, {"content": None}, {"content": ""}):
        history = [
            *USER,
            {"role": "assistant", "tool_calls": [call]} | content,
            {
                "role": "tool",
                "tool_call_id": "a",
                "content": [{"type": "text", "text": "x"}],
            },
        ]
        answer = http.post("/v1/chat/completions", json={"messages": history})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        ("none", {"enable_thinking": False, "thinking": False}),
        (
            "minimal",
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"},
        ),
        ("high", {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}),
    ],
)
def test_an_effort_reaches_the_template(
    server: Server, http: httpx.Client, effort: str, kwargs: dict[str, Any]
) -> None:
    body = {"messages": USER, "reasoning_effort": effort}
    http.post("/v1/chat/completions", json=body)
    assert server.tokenizer.template_kwargs == kwargs
    http.post(
        "/v1/chat/completions", json=body | {"chat_template_kwargs": {"thinking": None}}
    )
    assert server.tokenizer.template_kwargs == kwargs | {"thinking": None}


def test_the_answer_may_be_begun(server: Server, http: httpx.Client) -> None:
    history = [*USER, {"role": "assistant", "content": "It is"}]
    for fields, end in (
        ({"continue_final_message": True}, b"<assistant>It is"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            b"<assistant>It is",
        ),
        ({}, b"<assistant>It is\n<assistant>"),
    ):
        http.post("/v1/chat/completions", json={"messages": history} | fields)
        assert bytes(server.engine.requests[-1].prompt.token_ids).endswith(end)


def test_progress_is_told_in_chunks(http: httpx.Client) -> None:
    body = {"messages": USER, "stream": True, "return_progress": True}
    text = http.post("/v1/chat/completions", json=body).text
    chunks = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    told = [chunk for chunk in chunks if "prompt_progress" in chunk]
    total = told[0]["prompt_progress"]["total"]
    assert [each["prompt_progress"]["processed"] for each in told] == [0, total]
    assert all(each["prompt_progress"]["time_ms"] >= 0 for each in told)
    assert [each["choices"][0]["delta"] for each in told] == [{}, {}]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
