"""Anthropic's SDK against the routes: whole answers, streams, tools, thinking, counts,
errors. Every shape is validated with the SDK's own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic, beta_async_tool
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage
from pydantic import BaseModel, TypeAdapter

from mtplx.errors import GenerationError
from mtplx.types import Failed
from tests.server.fakes import engine_stopped, queue_full
from tests.server.messages.conftest import INFO, Api

MODEL = "claude-any-name"
USER = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": USER}
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLING = (
    "<think>", "Two ", "cities.", "</think>", "Let me ", "look.",
    "<call weather>", '{"city"', ': "Rome"}', "</call>",
    "<call weather>", '{"city": "Oslo"}', "</call>",
)  # fmt: skip


def with_sdk(api: Api, work: Callable[[AsyncAnthropic], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with api.sdk() as client:
            return await work(client)

    return asyncio.run(run())


def create(api: Api, **body: Any) -> Message:
    async def work(client: AsyncAnthropic) -> Message:
        return await client.messages.create(**{**ASK, **_extra(body)})

    message = with_sdk(api, work)
    return Message.model_validate(message.to_dict(), strict=True)


def stream(api: Api, **body: Any) -> tuple[list[RawMessageStreamEvent], Message]:
    """Return the raw events and what the SDK adds them up to."""

    async def work(client: AsyncAnthropic) -> Any:
        events = []
        raw = await client.messages.create(**{**ASK, **_extra(body)}, stream=True)
        async for event in raw:
            events.append(event)
        async with client.messages.stream(**{**ASK, **_extra(body)}) as managed:
            return events, await managed.get_final_message()

    events, message = with_sdk(api, work)
    adapter = TypeAdapter(RawMessageStreamEvent)
    return [adapter.validate_python(event.to_dict()) for event in events], message


def _extra(body: dict[str, Any]) -> dict[str, Any]:
    """Put what this SDK has no argument for into its `extra_body`."""
    loose = {k: body.pop(k) for k in ("temperature", "top_p", "top_k") if k in body}
    return {**body, "extra_body": loose} if loose else body


def test_create(api: Api) -> None:
    message = create(api)
    assert message.content[0].type == "text"
    assert message.content[0].text == "w0 w1 w2 w3 w4 "
    assert (message.role, message.model, message.stop_reason) == (
        "assistant", MODEL, "end_turn",
    )  # fmt: skip
    assert message.id.startswith("msg_")
    prompt_tokens = len(api.engine.requests[0].prompt.token_ids)
    assert message.usage.input_tokens == prompt_tokens
    assert message.usage.cache_read_input_tokens == 0
    assert message.usage.output_tokens == 5
    report = message.model_extra["mtplx"]
    assert report["prompt_tokens"] == prompt_tokens
    assert report["model"] == INFO.name


def test_the_beta_client(api: Api) -> None:
    api.engine.answer = CALLING

    async def work(client: AsyncAnthropic) -> Any:
        async with client.beta.messages.stream(
            **ASK, betas=["future-2030-01-01"]
        ) as events:
            return await events.get_final_message()

    message = BetaMessage.model_validate(with_sdk(api, work).to_dict())
    assert message.content[0].thinking == "Two cities."
    assert message.stop_reason == "tool_use"


def test_restored_tokens_are_not_input_tokens(api: Api) -> None:
    create(api)
    usage = create(api).usage
    prompt_tokens = len(api.engine.requests[0].prompt.token_ids)
    assert usage.input_tokens == 1
    assert usage.cache_read_input_tokens == prompt_tokens - 1
    assert usage.cache_creation_input_tokens == 0


def test_sampling_and_limits_reach_the_engine(api: Api) -> None:
    create(api, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END"])
    request = api.engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert request.stop == ("END",)
    assert request.max_new_tokens == 50


def test_max_tokens(api: Api) -> None:
    message = create(api, max_tokens=2)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 2


def test_no_tokens_only_reads_the_prompt(api: Api) -> None:
    message = create(api, max_tokens=0)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert api.engine.requests[0].max_new_tokens == 0


def test_the_context_ends_before_max_tokens(api: Api) -> None:
    room = 3
    history = "x" * (INFO.context_length - room - len("<user>\n<assistant>"))
    message = create(api, messages=[{"role": "user", "content": history}])
    assert message.usage.output_tokens == room
    assert message.stop_reason == "model_context_window_exceeded"


@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_thinking(api: Api, streamed: bool) -> None:
    api.engine.answer = CALLING
    body: dict[str, Any] = {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    message = stream(api, **body)[1] if streamed else create(api, **body)
    thinking, text, rome, oslo = message.content
    assert (thinking.type, text.type, rome.type, oslo.type) == (
        "thinking", "text", "tool_use", "tool_use",
    )  # fmt: skip
    assert (thinking.thinking, text.text) == ("Two cities.", "Let me look.")
    assert thinking.signature
    assert (rome.name, rome.input, oslo.input) == (
        "weather", {"city": "Rome"}, {"city": "Oslo"},
    )  # fmt: skip
    assert rome.id != oslo.id
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens_details.thinking_tokens > 0
    assert api.tokenizer.template_kwargs["enable_thinking"] is True


def test_a_tool_loop(api: Api) -> None:
    api.engine.answer = CALLING
    first = create(api, tools=[WEATHER])
    api.engine.answer = ("Sunny ", "in both.")
    calls = [block for block in first.content if block.type == "tool_use"]
    history = [
        *USER,
        {"role": "assistant", "content": [b.to_dict() for b in first.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
                for call in calls
            ],
        },
    ]
    second = create(api, tools=[WEATHER], messages=history)
    assert second.content[0].text == "Sunny in both."
    _, remembered, *results = api.tokenizer.messages
    assert [result["tool_call_id"] for result in results] == [call.id for call in calls]
    # What comes back as history is what the tokens were kept for.
    sent = api.tokenizer.remembered[0][2]
    for call in [*sent["tool_calls"], *remembered["tool_calls"]]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert remembered == sent


@pytest.mark.parametrize("streamed", [False, True])
def test_the_tool_runner(api: Api, streamed: bool) -> None:
    api.engine.answer = ("<call weather>", '{"city": "Rome"}', "</call>")
    cities = []

    @beta_async_tool
    async def weather(city: str) -> str:
        """Weather of a city."""
        cities.append(city)
        api.engine.answer = ("Sunny.",)
        return "Sunny"

    async def work(client: AsyncAnthropic) -> Any:
        runner = client.beta.messages.tool_runner(**ASK, tools=[weather], stream=streamed)
        return await runner.until_done()

    message = with_sdk(api, work)
    assert message.content[0].text == "Sunny."
    assert cities == ["Rome"]


def test_a_call_that_was_cut_off(api: Api) -> None:
    api.engine.answer = CALLING
    message = create(api, tools=[WEATHER], max_tokens=8)
    assert message.stop_reason == "max_tokens"
    assert message.content[-1].input == {}
    assert stream(api, tools=[WEATHER], max_tokens=9)[1].content[-1].input == {
        "city": "Rome"
    }


def test_the_events_of_a_stream(api: Api) -> None:
    api.engine.answer = (
        "<think>",
        "Hm.",
        "</think>",
        "A ",
        "B",
        "<call f>",
        "{}",
        "</call>",
    )
    events, message = stream(api)
    assert [_outline(event) for event in events] == [
        "message_start",
        "content_block_start 0 thinking",
        "content_block_delta 0 thinking_delta",
        "content_block_delta 0 signature_delta",
        "content_block_stop 0",
        "content_block_start 1 text",
        "content_block_delta 1 text_delta",
        "content_block_delta 1 text_delta",
        "content_block_stop 1",
        "content_block_start 2 tool_use",
        "content_block_delta 2 input_json_delta",
        "content_block_stop 2",
        "message_delta",
        "message_stop",
    ]
    prompt_tokens = len(api.engine.requests[0].prompt.token_ids)
    assert events[0].message.usage.input_tokens == prompt_tokens
    assert events[0].message.content == []
    assert events[-2].usage.input_tokens + events[-2].usage.cache_read_input_tokens == (
        prompt_tokens
    )
    whole = create(api)
    assert _without_ids(message) == _without_ids(whole)


def _outline(event: Any) -> str:
    words = [event.type]
    if "index" in type(event).model_fields:
        words.append(str(event.index))
    for part in ("content_block", "delta"):
        if hasattr(event, part) and hasattr(getattr(event, part), "type"):
            words.append(getattr(event, part).type)
    return " ".join(words)


def _without_ids(message: Any) -> list[Any]:
    return [
        {k: v for k, v in block.to_dict().items() if k not in ("id", "parsed_output")}
        for block in message.content
    ]


def test_a_stream_adds_up_to_truthful_usage(api: Api) -> None:
    create(api)
    usage = stream(api)[1].usage
    assert usage.input_tokens == 1
    assert usage.cache_read_input_tokens > 0
    assert usage.output_tokens == 5


def test_thinking_that_is_not_shown_comes_back(api: Api) -> None:
    api.engine.answer = ("<think>", "Secret.", "</think>", "Yes.")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    events, message = stream(api, thinking=thinking)
    assert "thinking_delta" not in " ".join(_outline(event) for event in events)
    assert message.content[0].thinking == ""
    echo = [block.to_dict() for block in create(api, thinking=thinking).content]
    create(api, messages=[*USER, {"role": "assistant", "content": echo}, *USER])
    assert api.tokenizer.messages[1]["reasoning_content"] == "Secret."


def test_count_tokens(api: Api) -> None:
    body = {"messages": USER, "system": "Be brief.", "tools": [WEATHER], "model": MODEL}

    async def work(client: AsyncAnthropic) -> MessageTokensCount:
        return await client.messages.count_tokens(**body)

    counted = with_sdk(api, work)
    MessageTokensCount.model_validate(counted.to_dict(), strict=True)
    assert api.engine.requests == []
    assert counted.input_tokens == create(api, **body).usage.input_tokens


def test_count_tokens_accepts_the_body_of_an_answer(api: Api) -> None:
    async def work(client: AsyncAnthropic) -> MessageTokensCount:
        return await client.messages.count_tokens(
            model=MODEL, messages=USER, extra_body={"max_tokens": 5, "temperature": 0.5}
        )

    assert with_sdk(api, work).input_tokens > 0


class City(BaseModel):
    name: str


def test_parse(api: Api) -> None:
    api.engine.answer = ('{"name": ', '"Rome"}')

    async def work(client: AsyncAnthropic) -> Any:
        return await client.messages.parse(**ASK, output_format=City)

    assert with_sdk(api, work).parsed_output == City(name="Rome")
    assert api.engine.requests[0].grammar is not None


# Errors.


def failure(api: Api, **body: Any) -> anthropic.APIStatusError:
    with pytest.raises(anthropic.APIStatusError) as caught:
        create(api, **body)
    error = caught.value
    assert error.body["type"] == "error"
    assert error.type == error.body["error"]["type"]
    assert error.request_id == error.response.headers["x-request-id"]
    return error


def test_bad_requests_name_the_field(api: Api) -> None:
    error = failure(api, messages=[{"role": "wizard", "content": "x"}])
    assert isinstance(error, anthropic.BadRequestError)
    assert error.type == "invalid_request_error"
    assert "messages[0].role" in error.api_message


def test_unknown_models(api: Api) -> None:
    error = failure(api, model="gemini")
    assert isinstance(error, anthropic.NotFoundError)
    assert error.type == "not_found_error"


def test_full_queues(api: Api) -> None:
    api.engine.refusal = queue_full()
    error = failure(api)
    assert isinstance(error, anthropic.RateLimitError)
    assert error.response.headers["retry-after"] == "2"


def test_stopped_engines(api: Api) -> None:
    api.engine.refusal = engine_stopped()
    error = failure(api)
    assert isinstance(error, anthropic.InternalServerError)
    assert error.type == "overloaded_error"


def test_failures(api: Api) -> None:
    api.engine.failure = Failed(GenerationError("Out of memory."))
    error = failure(api)
    assert isinstance(error, anthropic.InternalServerError)
    assert error.type == "api_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_prompts_that_are_too_long_say_so_in_anthropics_words(
    api: Api, streamed: bool
) -> None:
    long = [{"role": "user", "content": "x" * INFO.context_length}]
    error = failure(api, messages=long, stream=streamed)
    assert error.status_code == 400
    assert error.api_message.startswith("prompt is too long: ")


def test_a_stream_that_fails_ends_with_an_error_event(api: Api) -> None:
    api.engine.failure = Failed(GenerationError("Out of memory."))
    with pytest.raises(anthropic.APIStatusError) as caught:
        stream(api)
    assert caught.value.type == "api_error"
    assert caught.value.api_message == "Out of memory."


# On the wire.


def test_the_first_event_does_not_wait_for_the_engine(api: Api) -> None:
    api.engine.gate.clear()

    async def run() -> bytes:
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = json.dumps({**ASK, "stream": True}).encode()
        inbox = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return inbox.pop() if inbox else await asyncio.Future()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/messages", "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        answering = asyncio.create_task(api.app(scope, receive, sent.put))
        assert (await sent.get())["type"] == "http.response.start"
        first = (await sent.get())["body"]
        assert not api.engine.ended
        api.engine.open_gate()
        await answering
        return first

    first = asyncio.run(run())
    assert first.startswith(b'event: message_start\ndata: {"type":"message_start",')
    assert first.endswith(b"}\n\n")


def test_each_event_is_named_as_its_type(api: Api) -> None:
    async def run() -> str:
        transport = httpx2.ASGITransport(api.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://mtplx") as http:
            answer = await http.post("/v1/messages?beta=true", json={**ASK, "stream": True})
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["request-id"]
            return answer.text

    for event in asyncio.run(run()).strip().split("\n\n"):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix(
            "event: "
        )
