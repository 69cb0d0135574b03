"""Structured output: what a body says, and what the engine is held to."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai import OpenAI
from pydantic import BaseModel

from mtplx.server.structured import Structured
from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED = {"name": "answer", "schema": SCHEMA}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BYTES = LLTokenizer("byte")


def allows(grammar: str | None, text: str) -> bool:
    """Whether ``text`` is a whole answer by ``grammar``."""
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.get_error()
    return all(matcher.consume_token(byte) for byte in text.encode()) and (
        matcher.is_accepting()
    )


@pytest.mark.parametrize(
    ("fields", "allowed", "forbidden"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            '{"a": 1}',
            '{"b": 1}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": 1}', '{"a": "1"}'),
        ({"structured_outputs": {"json_object": True}}, "{}", '"{}"'),
        ({"structured_outputs": {"regex": "a+b"}}, "aab", "ba"),
        ({"structured_outputs": {"choice": ["a.b <c>\n", "é|"]}}, "a.b <c>\n", "axb <c>\n"),
        ({"structured_outputs": {"choice": ["a.b <c>\n", "é|"]}}, "é|", "é"),
        ({"structured_outputs": {"grammar": 'start: "x" start?'}}, "xxx", "y"),
    ],
)
def test_what_an_answer_may_be(
    fields: dict[str, Any], allowed: str, forbidden: str
) -> None:
    grammar = Structured(**fields).grammar()
    assert allows(grammar, allowed)
    assert not allows(grammar, forbidden)


def test_text_is_free() -> None:
    assert Structured().grammar() is None
    assert Structured(response_format={"type": "text"}).grammar() is None


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_the_engine_is_held_to_it(
    engine: FakeEngine, http: httpx.Client, path: str
) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    http.post(path, json=body)
    assert engine.requests[-1].grammar is None
    http.post(path, json=body | {"structured_outputs": {"regex": "a+b"}})
    assert allows(engine.requests[-1].grammar, "aab")
    assert not allows(engine.requests[-1].grammar, "b")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}]
)
def test_a_forced_call_is_a_grammar(
    engine: FakeEngine, http: httpx.Client, choice: object
) -> None:
    http.post(CHAT, json={"messages": USER, "tools": [TOOL], "tool_choice": choice})
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert allows(engine.requests[-1].grammar, call)
    assert allows(engine.requests[-1].grammar, f"{call}\n{call}")
    assert not allows(engine.requests[-1].grammar, "Hello")
    body = {"messages": USER, "tools": [TOOL], "tool_choice": choice}
    http.post(CHAT, json=body | {"parallel_tool_calls": False})
    assert allows(engine.requests[-1].grammar, call)
    assert not allows(engine.requests[-1].grammar, f"{call}\n{call}")


def test_the_sdk_parses_what_comes_back(openai: OpenAI, engine: FakeEngine) -> None:
    class Answer(BaseModel):
        a: int

    engine.answer = ('{"a": ', "7}")
    answer = openai.chat.completions.parse(
        model=INFO.name,
        messages=USER,  # type: ignore[arg-type]
        response_format=Answer,
    )
    assert answer.choices[0].message.parsed == Answer(a=7)
    assert engine.requests[-1].grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {"type": "odd"}}}, "structured_outputs.json"),
    ],
)
def test_what_cannot_be_used_is_named(
    engine: FakeEngine, http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    for path, body in ((CHAT, {"messages": USER}), ("/v1/completions", {"prompt": "Hi"})):
        answer = http.post(path, json=body | fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
    assert engine.requests == []
