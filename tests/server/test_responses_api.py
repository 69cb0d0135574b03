"""Responses through the real OpenAI SDK, whole and as streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import responses as types
from pydantic import BaseModel, TypeAdapter

from mtplx.errors import GenerationError
from mtplx.types import Failed, SamplingParams
from tests.server.conftest import INFO, Server
from tests.server.fakes import FakeEngine, engine_stopped, queue_full

ANSWER = "w0 w1 w2 w3 w4 "
PROMPT_TOKENS = len("<user>Hello\n<assistant>")
TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}
EVENT: TypeAdapter[Any] = TypeAdapter(types.ResponseStreamEvent)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named, and is one the SDK knows."""
    events = []
    *frames, rest = answer.text.split("\n\n")
    assert rest == ""
    for number, each in enumerate(frames):
        name, data = each.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_whole_answer(openai: OpenAI) -> None:
    answer = openai.responses.create(model=INFO.name, input="Hello")
    types.Response.model_validate(answer.to_dict())
    assert answer.output_text == ANSWER
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.input_tokens == PROMPT_TOKENS
    assert answer.usage.output_tokens == 5
    assert answer.usage.total_tokens == PROMPT_TOKENS + 5


def test_whole_answer_has_exactly_these_keys(server: Server, http: httpx.Client) -> None:
    sent = {"input": "Hello", "metadata": {"a": "b"}, "user": "ann", "store": False}
    body = http.post("/v1/responses", json=sent).json()
    [request] = server.engine.requests
    assert body.pop("id") == f"resp_{request.request_id}"
    assert body.pop("created_at") <= body.pop("completed_at")
    metrics = body.pop("mtplx")
    [message] = body.pop("output")
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
        ],
    }
    assert body == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {"a": "b"},
        "model": INFO.name,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": PROMPT_TOKENS,
            "input_tokens_details": {
                "cached_tokens": metrics["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": PROMPT_TOKENS + 5,
        },
        "user": "ann",
    }


def test_everything_reaches_the_engine(server: Server, http: httpx.Client) -> None:
    body = {
        "model": INFO.name,
        "instructions": "Be brief.",
        "input": [
            {"role": "developer", "content": "No jokes."},
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}],
            },
        ],
        "temperature": 0,
        "top_p": 0.5,
        "max_output_tokens": 3,
        "top_logprobs": 2,
        "tools": [TOOL],
        "reasoning": {"effort": "low", "summary": "auto"},
    }
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.requests
    assert request.sampling == SamplingParams(temperature=0, top_p=0.5)
    assert (request.max_new_tokens, request.logprobs) == (3, 2)
    assert server.tokenizer.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "No jokes."},
        {"role": "user", "content": "a"},
    ]
    [tool] = server.tokenizer.tools
    assert tool["function"]["name"] == "add"
    assert server.tokenizer.template_kwargs["reasoning_effort"] == "low"


def test_stream_of_a_text(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "Hello", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    item_ids = {event["item_id"] for event in events if "item_id" in event}
    whole = events[-1]["response"]
    assert item_ids == {whole["output"][0]["id"]}
    assert "".join(event["delta"] for event in events[4:9]) == ANSWER
    assert events[-2]["item"] == whole["output"][0]
    assert whole["mtplx"]["prompt_tokens"] == PROMPT_TOKENS
    assert http.get(f"/v1/responses/{whole['id']}").json() == whole


def test_stream_of_reasoning_text_and_calls(engine: FakeEngine, http: httpx.Client) -> None:
    engine.answer = (
        *("<think>", "Hm", "m.", "</think>", "Let me see."),
        *("<call add>", '{"a":', "1}", "</call>", "<call add>", "{}", "</call>"),
    )
    body = {"input": "Hello", "tools": [TOOL], "stream": True}
    events = events_of(http.post("/v1/responses", json=body))
    assert kinds(events)[2:-1] == [
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done"),
        *("output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done", "output_item.added"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
    ]
    indices = [event["output_index"] for event in events[2:-1]]
    assert indices == [0] * 7 + [1] * 6 + [2] * 5 + [3] * 4
    whole = events[-1]["response"]
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert whole["output"] == done
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert len({item["id"] for item in done}) == 4
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "Hmm."}]
    assert (done[2]["arguments"], done[3]["arguments"]) == ('{"a":1}', "{}")
    assert done[2]["call_id"] != done[3]["call_id"]
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_the_stream_begins_before_the_prefill(engine: FakeEngine, openai: OpenAI) -> None:
    engine.gate.clear()
    stream = openai.responses.create(model=INFO.name, input="Hello", stream=True)
    assert [next(stream).type for _ in range(2)] == [
        "response.created",
        "response.in_progress",
    ]
    assert engine.ended == {}
    engine.open_gate()
    assert list(stream)[-1].type == "response.completed"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off(
    engine: FakeEngine, http: httpx.Client, stream: bool
) -> None:
    engine.answer = ("Well.", "<call add>", '{"a":', "1}", "</call>")
    body = {"input": "Hello", "tools": [TOOL], "max_output_tokens": 3, "stream": stream}
    answer = http.post("/v1/responses", json=body)
    whole = events_of(answer)[-1]["response"] if stream else answer.json()
    types.Response.model_validate(whole)
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert whole["completed_at"] is None
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]


def test_a_call_that_was_complete_when_the_answer_was_cut_off(
    engine: FakeEngine, openai: OpenAI
) -> None:
    engine.answer = ("<call add>", '{"a":1}', "</call>", "And ", "now")
    for limit, statuses in ((3, ["completed"]), (4, ["completed", "incomplete"])):
        answer = openai.responses.create(
            model=INFO.name, input="Hello", tools=[TOOL], max_output_tokens=limit
        )
        assert answer.status == "incomplete"
        assert [item.to_dict()["status"] for item in answer.output] == statuses


def test_an_empty_answer_is_an_empty_message(engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = ()
    answer = openai.responses.create(model=INFO.name, input="Hello")
    assert [item.type for item in answer.output] == ["message"]
    assert answer.output_text == ""


def test_logprobs(openai: OpenAI) -> None:
    answer = openai.responses.create(
        model=INFO.name,
        input="Hello",
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    types.Response.model_validate(answer.to_dict())
    [message] = answer.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [each.token for each in part.logprobs] == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
    assert [len(each.top_logprobs) for each in part.logprobs] == [1] * 5
    stream = openai.responses.create(
        model=INFO.name, input="Hello", top_logprobs=1, stream=True
    )
    deltas = [each for each in stream if each.type == "response.output_text.delta"]
    assert [each.logprobs[0].token for each in deltas] == [
        each.token for each in part.logprobs
    ]


def test_prewarm_reads_and_says_nothing(engine: FakeEngine, openai: OpenAI) -> None:
    warmed = openai.responses.create(
        model=INFO.name, input="Hello", prompt_cache_options={"prewarm": True}
    )
    assert engine.requests[-1].max_new_tokens == 0
    assert (warmed.status, warmed.output) == ("completed", [])
    assert warmed.usage is not None
    assert warmed.usage.output_tokens == 0
    answer = openai.responses.create(model=INFO.name, input="Hello")
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == PROMPT_TOKENS - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_an_http_status(
    engine: FakeEngine, openai: OpenAI, stream: bool
) -> None:
    engine.refusal = queue_full()
    with pytest.raises(sdk.RateLimitError):
        openai.responses.create(model=INFO.name, input="Hello", stream=stream)
    engine.refusal = engine_stopped()
    with pytest.raises(sdk.InternalServerError):
        openai.responses.create(model=INFO.name, input="Hello", stream=stream)


def test_a_failure_is_a_status_or_the_last_event(
    engine: FakeEngine, openai: OpenAI, http: httpx.Client
) -> None:
    engine.failure = Failed(GenerationError("The logits are not numbers."))
    with pytest.raises(sdk.InternalServerError, match="not numbers"):
        openai.responses.create(model=INFO.name, input="Hello")
    events = events_of(http.post("/v1/responses", json={"input": "Hello", "stream": True}))
    assert kinds(events)[-2:] == ["output_item.done", "failed"]
    response = events[-1]["response"]
    assert response["status"] == "failed"
    assert response["error"] == {
        "code": "server_error",
        "message": "The logits are not numbers.",
        "param": None,
        "type": "server_error",
    }
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    assert openai.responses.retrieve(response["id"]).status == "failed"


class Point(BaseModel):
    x: int
    y: int


def test_parse_reads_the_answer_into_a_model(engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = ('{"x":', '1,"y"', ":2}")
    answer = openai.responses.parse(model=INFO.name, input="Where?", text_format=Point)
    assert answer.output_parsed == Point(x=1, y=2)
    assert engine.requests[-1].grammar is not None
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.to_dict()["schema"] == Point.model_json_schema() | {
        "additionalProperties": False
    }


def test_a_schema_is_repeated_in_the_answer(engine: FakeEngine, http: httpx.Client) -> None:
    engine.answer = ("{}",)
    form = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    body = {"input": "Hello", "text": {"format": form}}
    answer = http.post("/v1/responses", json=body).json()
    types.Response.model_validate(answer)
    assert answer["text"]["format"].items() >= form.items()
    assert engine.requests[-1].grammar is not None


def test_a_schema_that_cannot_be_used_is_refused(
    engine: FakeEngine, http: httpx.Client
) -> None:
    form = {"type": "json_schema", "name": "any", "schema": {"type": "nothing"}}
    answer = http.post("/v1/responses", json={"input": "a", "text": {"format": form}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("text.format.schema")
    assert engine.requests == []


def test_without_choice_no_tools_are_shown(server: Server, http: httpx.Client) -> None:
    body = {"input": "Hello", "tools": [TOOL], "tool_choice": "none"}
    answer = http.post("/v1/responses", json=body).json()
    assert server.tokenizer.tools == []
    assert answer["tool_choice"] == "none"
    [tool] = answer["tools"]
    assert tool.items() >= TOOL.items()


def test_a_function_can_be_forced(server: Server, openai: OpenAI) -> None:
    answer = openai.responses.create(
        model=INFO.name,
        input="Hello",
        tools=[TOOL],
        tool_choice={"type": "function", "name": "add"},
    )
    types.Response.model_validate(answer.to_dict())
    assert answer.to_dict()["tool_choice"] == {"type": "function", "name": "add"}
    assert server.tokenizer.tools[0]["function"]["name"] == "add"


def test_the_stream_helper_accumulates(engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = ('{"x":', '1,"y"', ":2}")
    with openai.responses.stream(
        model=INFO.name, input="Where?", text_format=Point
    ) as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        answer = stream.get_final_response()
    assert snapshots == ['{"x":', '{"x":1,"y"', '{"x":1,"y":2}']
    assert answer.output_parsed == Point(x=1, y=2)


def test_async_client(server: Server) -> None:
    async def both() -> tuple[str, list[str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            whole = await client.responses.create(model=INFO.name, input="Hello")
            async with client.responses.stream(model=INFO.name, input="Hello") as stream:
                seen = [str(event.type) async for event in stream]
            return whole.output_text, seen

    text, seen = asyncio.run(both())
    assert text == ANSWER
    assert (seen[0], seen[-1]) == ("response.created", "response.completed")
