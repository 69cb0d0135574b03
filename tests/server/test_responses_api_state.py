"""Conversations that go on: by the id of a response, by whole items, by references."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from openai.types.responses import ResponseItemList

from mtplx.config import read_configuration
from mtplx.errors import GenerationError
from mtplx.server.app import build_app
from mtplx.types import Failed
from tests.server.conftest import INFO, Server
from tests.server.fakes import FakeEngine, FakeTokenizer

ANSWER = "w0 w1 w2 w3 w4 "
TOOL: Any = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object"},
    "strict": False,
}
CALL = ("<think>", "Hm.", "</think>", "Wait.", "<call add>", '{"a":1}', "</call>")


def ask(openai: OpenAI, text: Any, **more: Any) -> Any:
    return openai.responses.create(model=INFO.name, input=text, **more)


def messages_after_a_call(call_id: str) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": '{"a":1}'}
    return [
        {"role": "user", "content": "One?"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "name": "add", "content": "2"},
    ]


def output_for(answer: Any, text: str = "2") -> Any:
    call = answer.output[-1]
    assert call.type == "function_call"
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def test_going_on_by_id(server: Server, openai: OpenAI) -> None:
    first = ask(openai, "One?", instructions="Be brief.")
    second = ask(openai, "Two?", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    # As with OpenAI, instructions are of one turn only.
    assert server.tokenizer.messages == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Two?"},
    ]
    third = ask(openai, "Three?", previous_response_id=second.id)
    assert len(server.tokenizer.messages) == 5
    # Two answers to one conversation do not know of each other.
    ask(openai, "Else?", previous_response_id=first.id)
    assert [m["content"] for m in server.tokenizer.messages[::2]] == ["One?", "Else?"]
    assert third.usage.input_tokens > second.usage.input_tokens


def test_the_next_turn_reads_the_answer_as_it_was_remembered(
    server: Server, engine: FakeEngine, openai: OpenAI
) -> None:
    engine.answer = CALL
    first = ask(openai, "One?", tools=[TOOL])
    _, _, remembered = server.tokenizer.remembered[-1]
    ask(openai, [output_for(first)], tools=[TOOL], previous_response_id=first.id)
    assert server.tokenizer.messages[1] == remembered


def test_a_tool_loop_by_id(server: Server, engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = CALL
    first = ask(openai, "One?", tools=[TOOL])
    engine.answer = ("Two.",)
    second = ask(openai, [output_for(first)], tools=[TOOL], previous_response_id=first.id)
    assert second.output_text == "Two."
    call_id = first.output[-1].call_id
    assert server.tokenizer.messages == messages_after_a_call(call_id)


@pytest.mark.parametrize("dumped", [False, True])
def test_a_tool_loop_without_the_store(
    server: Server, engine: FakeEngine, openai: OpenAI, dumped: bool
) -> None:
    engine.answer = CALL
    first = ask(openai, "One?", tools=[TOOL], store=False)
    output = [item.model_dump() for item in first.output] if dumped else first.output
    history = [{"role": "user", "content": "One?"}, *output, output_for(first)]
    second = ask(
        openai,
        history,
        tools=[TOOL],
        store=False,
        include=["reasoning.encrypted_content"],
    )
    call_id = first.output[-1].call_id
    assert server.tokenizer.messages == messages_after_a_call(call_id)
    for response in (first, second):
        with pytest.raises(sdk.NotFoundError):
            openai.responses.retrieve(response.id)


def test_parsed_answers_can_be_sent_back(
    server: Server, engine: FakeEngine, openai: OpenAI
) -> None:
    engine.answer = CALL
    strict: Any = {**TOOL, "strict": True}
    first = openai.responses.parse(model=INFO.name, input="One?", tools=[strict])
    assert first.output[-1].parsed_arguments == {"a": 1}  # type: ignore[union-attr]
    history = [{"role": "user", "content": "One?"}, *first.output, output_for(first)]
    ask(openai, history, tools=[strict])
    assert server.tokenizer.messages[1]["tool_calls"][0]["function"]["name"] == "add"


def test_going_on_by_references(server: Server, engine: FakeEngine, openai: OpenAI) -> None:
    engine.answer = CALL
    first = ask(openai, "One?", tools=[TOOL])
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    history = [{"role": "user", "content": "One?"}, *references, output_for(first)]
    ask(openai, history, tools=[TOOL])
    call_id = first.output[-1].call_id
    assert server.tokenizer.messages == messages_after_a_call(call_id)
    openai.responses.delete(first.id)
    # The second response holds them too.
    ask(openai, history, tools=[TOOL])


def test_a_call_that_was_cut_off_was_never_made(
    server: Server, engine: FakeEngine, openai: OpenAI
) -> None:
    engine.answer = ("Wait.", "<call add>", '{"a":', "1}", "</call>")
    first = ask(openai, "One?", tools=[TOOL], max_output_tokens=3)
    assert first.output[-1].status == "incomplete"
    ask(openai, "Go on.", tools=[TOOL], previous_response_id=first.id)
    assert "tool_calls" not in server.tokenizer.messages[1]
    with pytest.raises(sdk.BadRequestError, match="No function call") as error:
        ask(openai, [output_for(first)], previous_response_id=first.id)
    assert error.value.param == "input[0].call_id"


def test_consecutive_answers_stay_apart(server: Server, openai: OpenAI) -> None:
    history = [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": []},
        {"role": "user", "content": "c"},
    ]
    ask(openai, history)
    assert [m["content"] for m in server.tokenizer.messages] == ["a", "b", "c"]


def test_retrieve_and_delete(openai: OpenAI) -> None:
    answer = ask(openai, "One?")
    assert openai.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    openai.responses.delete(answer.id)
    for call in (openai.responses.retrieve, openai.responses.delete):
        with pytest.raises(sdk.NotFoundError, match="kept in memory") as gone:
            call(answer.id)
        assert gone.value.code == "response_not_found"
    with pytest.raises(sdk.NotFoundError, match=answer.id) as gone:
        ask(openai, "Two?", previous_response_id=answer.id)
    assert gone.value.param == "previous_response_id"
    assert gone.value.code == "previous_response_not_found"
    [item] = answer.output
    with pytest.raises(sdk.NotFoundError) as gone:
        ask(openai, [{"type": "item_reference", "id": item.id}])
    assert gone.value.param == "input[0].id"


def test_nothing_can_be_cancelled(openai: OpenAI) -> None:
    answer = ask(openai, "One?")
    with pytest.raises(sdk.BadRequestError, match="background") as refused:
        openai.responses.cancel(answer.id)
    assert refused.value.code == "response_not_cancellable"
    with pytest.raises(sdk.NotFoundError):
        openai.responses.cancel("resp_nothing")


def test_a_stored_response_is_not_streamed(openai: OpenAI) -> None:
    answer = ask(openai, "One?")
    with pytest.raises(sdk.BadRequestError) as refused:
        openai.responses.retrieve(answer.id, stream=True)
    assert refused.value.param == "stream"


def test_input_items(openai: OpenAI, http: httpx.Client) -> None:
    first = ask(openai, "One?")
    second = ask(
        openai,
        [{"role": "user", "content": "Two?"}, {"role": "user", "content": "Three?"}],
        previous_response_id=first.id,
    )
    page = http.get(f"/v1/responses/{second.id}/input_items").json()
    ResponseItemList.model_validate(page)
    texts = [item["content"][0]["text"] for item in page["data"]]
    assert texts == ["Three?", "Two?", ANSWER, "One?"]
    assert page["has_more"] is False
    items = openai.responses.input_items.list(second.id, limit=1, order="asc")
    assert [item.id for item in items] == [item["id"] for item in page["data"][::-1]]
    assert page["data"][2]["id"] == first.output[0].id


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=-1", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_nothing", "after"),
    ],
)
def test_a_bad_query_is_refused(
    openai: OpenAI, http: httpx.Client, query: str, param: str
) -> None:
    answer = http.get(f"/v1/responses/{ask(openai, 'One?').id}/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_input_tokens_are_counted_without_the_engine(
    engine: FakeEngine, openai: OpenAI
) -> None:
    first = ask(openai, "One?")
    counted = openai.responses.input_tokens.count(
        model=INFO.name, input="Two?", previous_response_id=first.id, tools=[TOOL]
    )
    assert counted.object == "response.input_tokens"
    assert len(engine.requests) == 1
    second = ask(openai, "Two?", previous_response_id=first.id, tools=[TOOL])
    assert counted.input_tokens == second.usage.input_tokens


def diagnosis(openai: OpenAI, text: Any, earlier: str, **more: Any) -> Any:
    options = {"comparison_response_id": earlier}
    return ask(openai, text, prompt_cache_options=options, **more).prompt_cache_diagnostics


def test_diagnostics_say_what_was_changed(openai: OpenAI) -> None:
    first = ask(openai, "One?", tools=[TOOL])
    same = diagnosis(openai, "Two?", first.id, tools=[TOOL], previous_response_id=first.id)
    assert same.type == "cache_hit"
    other = {**TOOL, "name": "sub"}
    changed = diagnosis(
        openai, "Two?", first.id, tools=[other], previous_response_id=first.id
    )
    assert (changed.type, changed.reason) == ("cache_miss", "tools_changed")
    assert changed.cache_missed_tokens > 0
    assert diagnosis(openai, "Six?", first.id, tools=[TOOL]).reason == "input_changed"
    assert (
        diagnosis(openai, "One?", first.id, tools=[TOOL], instructions="x").reason
        == "input_changed"
    )
    assert (
        diagnosis(
            openai, "One?", first.id, tools=[TOOL], reasoning={"effort": "low"}
        ).reason
        == "reasoning_effort_changed"
    )
    nothing = diagnosis(openai, "One?", "resp_nothing", tools=[TOOL])
    assert nothing.type == "comparison_response_not_found"
    assert ask(openai, "One?").prompt_cache_diagnostics is None


def test_a_failed_response_can_be_continued(engine: FakeEngine, openai: OpenAI) -> None:
    engine.failure = Failed(GenerationError("The logits are not numbers."))
    events = list(openai.responses.create(model=INFO.name, input="One?", stream=True))
    engine.failure = None
    assert events[-1].type == "response.failed"
    answer = ask(openai, "Go on.", previous_response_id=events[-1].response.id)
    assert answer.status == "completed"


def test_a_client_that_goes_away_leaves_nothing(engine: FakeEngine, openai: OpenAI) -> None:
    engine.gate.clear()
    stream = openai.responses.create(model=INFO.name, input="One?", stream=True)
    created = next(stream)
    assert created.type == "response.created"
    stream.close()
    engine.wait_idle()
    with pytest.raises(sdk.NotFoundError):
        openai.responses.retrieve(created.response.id)


def test_a_response_is_there_for_its_key_only() -> None:
    engine = FakeEngine()
    app = build_app(
        engine=engine,
        tokenizer=FakeTokenizer(),
        info=INFO,
        configuration=read_configuration({"api_key": "ann-key,bob-key"}, environment={}),
    )

    async def codes() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost"
        ) as to:
            ann, bob = ({"Authorization": f"Bearer {key}-key"} for key in ("ann", "bob"))
            made = await to.post("/v1/responses", json={"input": "One?"}, headers=ann)
            name, [item] = made.json()["id"], made.json()["output"]
            path = f"/v1/responses/{name}"
            on = {"input": "Two?", "previous_response_id": name}
            reference = {"input": [{"type": "item_reference", "id": item["id"]}]}
            answers = [
                await to.get(path, headers=bob),
                await to.get(f"{path}/input_items", headers=bob),
                await to.delete(path, headers=bob),
                await to.post("/v1/responses", json=on, headers=bob),
                await to.post("/v1/responses", json=reference, headers=bob),
                await to.get(path),
                await to.get(path, headers=ann),
                await to.post("/v1/responses", json=on, headers=ann),
                await to.post("/v1/responses", json=reference, headers=ann),
            ]
            return [answer.status_code for answer in answers]

    try:
        assert asyncio.run(codes()) == [404] * 5 + [401] + [200] * 3
    finally:
        engine.close()
