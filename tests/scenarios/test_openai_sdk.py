"""The official openai SDK drives the real server, with the real demo model.

The model is small: what it must say is asked for by a grammar, a bias or at temperature
0, and every answer is short. ``test_demo_chat`` has what plain chats do.
"""

from __future__ import annotations

import json
import re
from typing import Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

QUESTION = {"role": "user", "content": "What is the capital of France? Answer briefly."}
ANSWER = "The capital of France is Paris."
# An enum has an end, which free text of this model may not have.
ZONES = {
    "type": "object",
    "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
CITIES = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": ZONES}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}
FLAT_CLOCK = {"type": "function", "name": "clock", "parameters": ZONES, "strict": True}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


def settings(server, **more):
    return {"model": server.model, "messages": [QUESTION], "temperature": 0, **more}


def chat(server, **more):
    return server.client.chat.completions.create(**settings(server, **more))


def post(server, path, **body):
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def test_two_answers_are_two_and_streamed_the_same(server):
    asked = {"n": 2, "seed": 6, "temperature": 1, "max_completion_tokens": 4}
    whole = chat(server, **asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage.completion_tokens == 8
    assert whole.usage.prompt_tokens == whole.mtplx["prompt_tokens"]

    pieces = ["", ""]
    for chunk in chat(server, **asked, stream=True):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
    assert pieces == texts


def test_the_stream_helper_puts_an_answer_and_its_usage_together(server):
    with server.client.chat.completions.stream(
        **settings(server, max_tokens=12, stream_options={"include_usage": True})
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        completion = stream.get_final_completion()
    assert "".join(deltas) == completion.choices[0].message.content == ANSWER
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage.completion_tokens == 8


def test_log_probabilities_belong_to_the_text(server):
    asked = {"max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    (choice,) = chat(server, **asked).choices
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens) == b"The capital"
    for token in tokens:
        best, other = token.top_logprobs
        # Greedy: the token is the likeliest of its place.
        assert (best.token, best.logprob) == (token.token, token.logprob)
        assert other.logprob < best.logprob < 0
    streamed = [
        token.token
        for chunk in chat(server, **asked, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert streamed == [token.token for token in tokens]


def test_a_bias_forces_a_token_and_the_next_prompt_is_as_before(server):
    """Spaces that were an answer once read as the beginning of the same prompt."""
    token_ids = {}
    for word in (" Rome", "  "):
        said = post(server, "/tokenize", prompt=word, add_special_tokens=False)
        (token_ids[word],) = said["tokens"]
    forced = chat(server, max_tokens=2, logit_bias={str(token_ids[" Rome"]): 100})
    assert forced.choices[0].message.content.split() == ["Rome", "Rome"]
    spaces = chat(server, max_tokens=1, logit_bias={str(token_ids["  "]): 100})
    assert not spaces.choices[0].message.content.strip()
    again = chat(server, max_tokens=2)
    assert again.usage.prompt_tokens == forced.usage.prompt_tokens
    assert again.choices[0].message.content == "The capital"


def test_a_stop_string_over_several_tokens_never_shows_in_a_stream(server):
    chunks = chat(server, max_tokens=12, stop=["never", "tal of Fra"], stream=True)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "The capi"
    assert choices[-1].finish_reason == "stop"


def test_what_clients_send_beside_the_question_is_taken(server):
    said = chat(
        server,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Say hello."}]},
            {"role": "system", "content": "Be kind."},
        ],
        max_tokens=2,
        user="someone",
        metadata={"run": "1"},
        prompt_cache_key="talk",
        reasoning_effort="low",
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
    )
    assert said.usage.completion_tokens == 2


def test_an_answer_goes_on_where_its_client_began_it(server):
    begun = {"role": "assistant", "content": "The capital of France is"}
    said = chat(
        server,
        messages=[QUESTION, begun],
        max_tokens=1,
        extra_body={"continue_final_message": True},
    )
    assert said.choices[0].message.content.strip() == "Paris"


def test_a_required_call_is_streamed_and_put_together_by_the_helper(server):
    with server.client.chat.completions.stream(
        **settings(server, max_tokens=40),
        tools=[openai.pydantic_function_tool(City, name="note_city")],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        events = [event for event in stream if event.type.startswith("tool_calls")]
        (choice,) = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "note_city"
    assert isinstance(call.function.parsed_arguments, City)
    *deltas, done = events
    assert len(deltas) > 3
    assert "".join(d.arguments_delta for d in deltas) == call.function.arguments
    assert done.arguments == call.function.arguments


def test_a_named_call_its_result_and_the_answer(server):
    tools = [CLOCK, WEATHER]
    first = chat(
        server,
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "clock"}},
        parallel_tool_calls=False,
        max_tokens=40,
    )
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is noon."}
    # As an SDK user sends it back: the message object itself.
    talk = [QUESTION, choice.message, result]
    second = chat(server, messages=talk, tools=tools, max_tokens=4)
    assert second.choices[0].message.content
    made = first.usage.prompt_tokens + first.usage.completion_tokens
    # Its own call is history now, and not a token of it is read again but the last.
    assert second.usage.prompt_tokens_details.cached_tokens >= made - 2


def test_a_call_that_is_cut_off_says_so(server):
    (choice,) = chat(server, tools=[CLOCK], tool_choice="required", max_tokens=14).choices
    assert choice.finish_reason == "length"


def test_tools_that_may_be_called_leave_an_answer_free(server):
    (choice,) = chat(server, tools=[CLOCK], max_tokens=12).choices
    assert choice.message.content
    assert choice.message.tool_calls is None


def test_parse_returns_the_model_that_was_asked_for(server):
    asked = settings(server, max_tokens=32, response_format=City)
    (choice,) = server.client.chat.completions.parse(**asked).choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == City.model_validate_json(choice.message.content)
    with server.client.chat.completions.stream(**asked) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.message.parsed == choice.message.parsed


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [({"regex": "[0-9]{3}"}, None), ({"choice": ["yes", "no"]}, ("yes", "no"))],
    ids=["regex", "choice"],
)
def test_structures_beyond_json(server, wanted, allowed):
    said = chat(server, max_tokens=8, extra_body={"structured_outputs": wanted})
    text = said.choices[0].message.content
    assert text in allowed if allowed else len(text) == 3
    assert text.isalpha() if allowed else text.isdigit()


def test_completions_echo_their_prompt_with_log_probabilities(server):
    said = server.client.completions.create(
        model=server.model,
        prompt="The capital of France is",
        max_tokens=1,
        temperature=0,
        echo=True,
        logprobs=2,
    )
    (choice,) = said.choices
    assert choice.text == "The capital of France is Paris"
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert max(choice.logprobs.token_logprobs[1:]) < 0
    assert choice.logprobs.text_offset[-1] == len("The capital of France is")


def test_completions_take_batches_and_token_ids(server):
    texts = ["One, two, three,", "The capital of France is"]
    ids = [post(server, "/tokenize", prompt=text)["tokens"] for text in texts]
    asked = {"model": server.model, "max_tokens": 2, "temperature": 0, "n": 2}
    from_text = server.client.completions.create(prompt=texts, **asked)
    from_ids = server.client.completions.create(prompt=ids, **asked)
    told = [choice.text for choice in from_text.choices]
    assert [choice.index for choice in from_text.choices] == [0, 1, 2, 3]
    assert told[0] == told[1] != told[2] == told[3]
    assert told == [choice.text for choice in from_ids.choices]
    assert from_text.usage.prompt_tokens == sum(map(len, ids))
    assert from_text.usage.completion_tokens == 8


def respond(server, **more):
    return server.client.responses.create(
        **{"model": server.model, "temperature": 0, "max_output_tokens": 4, **more}
    )


def test_responses_are_stored_continued_and_deleted(server):
    responses = server.client.responses
    first = respond(server, input="Say hello.", metadata={"run": "1"})
    assert (first.status, first.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    second = respond(server, input="Again.", previous_response_id=first.id)
    known = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens == known - 1
    stored = responses.retrieve(first.id)
    assert stored.output_text == first.output_text != ""
    assert stored.metadata == {"run": "1"}
    (item,) = responses.input_items.list(first.id).data
    assert item.content[0].text == "Say hello."
    responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        responses.retrieve(first.id)


def test_responses_are_streamed(server):
    asked = {"model": server.model, "temperature": 0, "max_output_tokens": 12}
    with server.client.responses.stream(**asked, input=QUESTION["content"]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    deltas = [e.delta for e in events if e.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == ANSWER
    assert [event.sequence_number for event in events] == sorted(
        event.sequence_number for event in events
    )


def test_responses_are_parsed(server):
    parsed = server.client.responses.parse(
        model=server.model,
        temperature=0,
        max_output_tokens=32,
        input="Is Paris a capital?",
        text_format=City,
    )
    assert isinstance(parsed.output_parsed, City)


def test_a_function_loop_over_stored_responses(server):
    tools = [FLAT_CLOCK]
    first = respond(
        server,
        input="What time is it?",
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=40,
    )
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "clock", "completed")
    assert json.loads(call.arguments)["zone"] in ("UTC", "CET")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Noon."}
    second = respond(server, input=[output], previous_response_id=first.id, tools=tools)
    assert second.output_text
    made = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= made - 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:,"}}],
                    }
                ]
            },
            "messages[0].content[0]",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "never",
                        "strict": True,
                        "schema": {"type": "string", "minLength": 2, "maxLength": 1},
                    },
                }
            },
            "response_format",
        ),
    ],
    ids=["temperature", "tool_choice", "image", "schema"],
)
def test_what_cannot_be_done_is_a_bad_request_that_names_it(server, changes, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(server, max_tokens=2, **changes)
    assert refused.value.param.startswith(param)


def test_text_goes_to_tokens_and_back(server):
    text = "The sea, 7 ships & a café."
    tokens = post(server, "/tokenize", prompt=text, return_token_strs=True)
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert post(server, "/detokenize", tokens=tokens["tokens"])["prompt"] == text


def test_a_prompt_is_planned_read_and_then_known(server):
    body = {"messages": [{"role": "user", "content": "Count the ships in the harbour."}]}
    plan = post(server, "/v1/prefill/plan", **body)
    assert plan["new_tokens"] > 1
    assert sum(span["end"] - span["start"] for span in plan["spans"]) == plan["new_tokens"]
    read = post(server, "/v1/prefill", **body)
    assert read["mtplx"]["new_prefill_tokens"] == plan["new_tokens"]
    known = post(server, "/v1/prefill/plan", **body)
    assert (known["new_tokens"], known["cache_miss_reason"]) == (1, None)
    assert known["cached_tokens"]["memory"] == known["prompt_tokens"] - 1


def test_the_metrics_count_what_was_asked(server):
    def iterations():
        text = httpx.get(f"{server.url}/metrics", timeout=30).text
        return float(re.search(r"^mtplx_iterations_total (.+)$", text, re.MULTILINE)[1])

    before = iterations()
    chat(server, max_tokens=2)
    assert iterations() >= before + 2
