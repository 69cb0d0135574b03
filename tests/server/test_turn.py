"""What a turn asks of the engine and of the text layer, whichever API it is for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from fastapi import Request, Response
from fastapi.testclient import TestClient

from mtplx.config import read_configuration
from mtplx.server.names import ModelNames
from mtplx.server.responses import json_response
from mtplx.server.service import Service
from mtplx.server.turn import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    ToolChoice,
    TurnEnd,
    TurnRequest,
    open_turn,
)
from mtplx.text.grammar import regex_grammar
from mtplx.types import Finished, PrefillProgress
from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine, FakeTokenizer
from tests.server.small_app import LOCAL, small_app, small_client

USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = "/v1/chat/completions"


@pytest.fixture
def engine() -> Any:
    engine = FakeEngine()
    yield engine
    engine.close()


def run(engine: FakeEngine, turn: TurnRequest, events: list[Any]) -> dict[str, Any]:
    """Run ``turn`` on a server, fill ``events``, and return the message."""

    app = small_app(engine)
    configuration = read_configuration({}, environment={"HOME": "/nowhere"})
    generations = app.state.generations
    names = ModelNames.read(engine.names, "")
    service = Service(engine, FakeTokenizer(), INFO, configuration, generations, names)

    @app.post("/turn")
    async def route(request: Request) -> Response:
        async with open_turn(service, request, turn) as opened:
            async for event in opened:
                events.append(event)
        return json_response(opened.message)

    with TestClient(app, base_url=LOCAL) as client:
        answer = client.post("/turn")
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


def test_the_events_of_a_turn(engine: FakeEngine) -> None:
    engine.answer = ("<think>", "hm", "</think>", "a", "<call f>", "{}", "</call>")
    events: list[Any] = []
    message = run(engine, TurnRequest(messages=USER, tools=[TOOL]), events)
    kinds = [type(event) for event in events]
    assert kinds == [
        PrefillProgress,
        PrefillProgress,
        ReasoningPart,
        TextPart,
        ToolCallStart,
        ToolCallArguments,
        TurnEnd,
    ]
    end = events[-1]
    assert (end.reason, end.reasoning_tokens, end.stop_sequence) == ("tool_calls", 3, None)
    assert isinstance(end.finished, Finished)
    assert message == {
        "role": "assistant",
        "content": "a",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": events[4].call_id,
                "type": "function",
                "function": {"name": "f", "arguments": "{}"},
            }
        ],
    }


def test_what_is_asked_reaches_the_engine(engine: FakeEngine) -> None:
    turn = TurnRequest(
        messages=USER,
        tools=[TOOL],
        tool_choice=ToolChoice("none"),
        stop=("x",),
        max_new_tokens=0,
        namespace="mine",
        deadline_after_s=1e6,
        logprobs=2,
        grammar=regex_grammar("a+"),
    )
    events: list[Any] = []
    run(engine, turn, events)
    [request] = engine.requests
    assert request.stop == ("x",)
    assert request.max_new_tokens == 0
    assert request.namespace == "mine"
    assert request.logprobs == 2
    assert request.grammar is not None
    assert "a+" in request.grammar
    assert request.deadline_s is not None
    assert request.deadline_s - request.arrival_s == pytest.approx(1e6)
    assert b"<tool>" not in bytes(request.prompt.token_ids)
    assert events[-1].reason == "length"


def test_a_stop_string_ends_a_call_that_is_not_one_then(engine: FakeEngine) -> None:
    engine.answer = ("a", "<call f>", "{", "END", "}", "</call>")
    events: list[Any] = []
    message = run(engine, TurnRequest(messages=USER, tools=[TOOL], stop=("END",)), events)
    assert (events[-1].reason, events[-1].stop_sequence) == ("stop", "END")
    assert "END" not in str(message)


@pytest.mark.parametrize(
    ("isolation", "shared"),
    [
        ("none", (True, True)),
        ("api-key", (True, False)),
        ("prompt-cache-key", (False, True)),
    ],
)
def test_who_shares_state(
    engine: FakeEngine, isolation: str, shared: tuple[bool, bool]
) -> None:
    def ask(path: str, key: str, **fields: Any) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        body = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
        assert client.post(path, json=body | fields, headers=headers).status_code == 200
        return engine.requests[-1].namespace

    flags = {"api_key": "one,two", "cache_isolation": isolation}
    with small_client(engine, **flags) as client:
        for path in (CHAT, "/v1/completions"):
            first = ask(path, "one", prompt_cache_key="a")
            assert (first == "") == (isolation == "none")
            assert "one" not in first
            other_name = ask(path, "one", prompt_cache_key="b")
            other_key = ask(path, "two", prompt_cache_key="a")
            assert (first == other_name, first == other_key) == shared


def test_texts_are_logged_only_where_asked(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    for asked in (False, True):
        caplog.clear()
        with (
            small_client(engine, log_prompts=asked) as client,
            caplog.at_level(logging.INFO, "mtplx.server"),
        ):
            client.post(CHAT, json={"messages": USER})
            client.post("/v1/completions", json={"prompt": "Howdy"})
        assert ("Hello" in caplog.text) is asked
        assert ("Howdy" in caplog.text) is asked
        assert ("w0 w1" in caplog.text) is asked
