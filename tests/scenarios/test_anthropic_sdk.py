"""The official anthropic SDK drives the real server, with the real demo model."""

from __future__ import annotations

import anthropic
import pytest

QUESTION = {"role": "user", "content": "What is the capital of France? Answer briefly."}
ANSWER = "The capital of France is Paris."
CLOCK = {
    "name": "clock",
    "description": "Time in a zone.",
    "input_schema": {
        "type": "object",
        "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}
MUST_CALL = {"type": "any", "disable_parallel_tool_use": True}
# The SDK has no word for it any more; the API has.
GREEDY = {"temperature": 0}


def sdk(server):
    return anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=120
    )


def settings(server, **more):
    base = {"model": server.model, "max_tokens": 12, "messages": [QUESTION]}
    return {**base, "extra_body": GREEDY, **more}


def create(server, **more):
    return sdk(server).messages.create(**settings(server, **more))


def test_a_message_is_the_same_whole_and_streamed(server):
    whole = create(server)
    (block,) = whole.content
    assert (block.type, block.text) == ("text", ANSWER)
    assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens == 8

    with sdk(server).messages.stream(**settings(server)) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == ANSWER
    assert len(pieces) > 3
    assert final.stop_reason == "end_turn"
    # What was restored is not billed as input a second time.
    read = final.usage.cache_read_input_tokens
    assert read + final.usage.input_tokens == whole.mtplx["prompt_tokens"]
    assert final.usage.input_tokens == 1


def test_an_answer_ends_at_its_limit_or_a_stop_sequence(server):
    assert create(server, max_tokens=2).stop_reason == "max_tokens"
    stopped = create(server, stop_sequences=["tal of Fra"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "tal of Fra")
    assert stopped.content[0].text == "The capi"


def test_an_answer_goes_on_where_its_client_began_it(server):
    begun = {"role": "assistant", "content": "The capital of France is"}
    said = create(server, messages=[QUESTION, begun], max_tokens=1)
    assert said.content[0].text.strip() == "Paris"


def test_a_tool_loop(server):
    tools = {"tools": [CLOCK]}
    with sdk(server).messages.stream(
        **settings(server, **tools, tool_choice=MUST_CALL, max_tokens=40)
    ) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.name == "clock"
    assert call.input["zone"] in ("UTC", "CET")
    assert len(pieces) > 2
    talk = [
        QUESTION,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "It is noon."}
            ],
        },
    ]
    second = create(server, messages=talk, **tools, max_tokens=4)
    assert second.content[0].text
    usage = first.usage
    made = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert second.usage.cache_read_input_tokens >= made - 2


def test_an_answer_in_json(server):
    said = create(
        server,
        max_tokens=32,
        output_config={"format": {"type": "json_schema", "schema": CLOCK["input_schema"]}},
    )
    assert said.stop_reason == "end_turn"
    assert said.content[0].text.replace(" ", "") in (
        '{"zone":"UTC"}',
        '{"zone":"CET"}',
    )


def test_tokens_are_counted_as_they_are_read(server):
    counted = sdk(server).messages.count_tokens(
        model=server.model, messages=[QUESTION], system="Be brief."
    )
    said = create(server, system="Be brief.", max_tokens=1)
    usage = said.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_state_is_kept_where_a_client_marks_it(server):
    system = [
        {
            "type": "text",
            "text": "You sort ships by their flags, and say only what was asked.",
            "cache_control": {"type": "ephemeral"},
        }
    ]
    first, second = (
        create(
            server,
            system=system,
            messages=[{"role": "user", "content": text}],
            max_tokens=1,
        )
        for text in ("Which is first?", "How many are red?")
    )
    assert second.usage.cache_read_input_tokens >= 12
    assert second.usage.cache_creation_input_tokens == 0
    assert first.mtplx["prompt_tokens"] > 12


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"model": "none-such"}, anthropic.NotFoundError, "none-such"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "image",
        ),
    ],
    ids=["empty", "model", "image"],
)
def test_errors_are_the_sdks_own(server, changes, error, told):
    with pytest.raises(error, match=told) as raised:
        create(server, **changes)
    assert raised.value.body["type"] == "error"
