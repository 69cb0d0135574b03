"""No token is read twice: in the next turn, in a tool loop, by another client."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest

from tests.engine.conversation import (
    KINDS,
    RESUME_TOKENS,
    Chat,
    chat_model_of,
    cold_tokens,
    common_tokens,
    generate,
    running,
)
from tests.text.tokenizers_factory import (
    QWEN,
    THINKING,
    assistant,
    call,
    result,
    system,
    tool,
    user,
)
from tests.tiny_models import ANY_PREFIX

SYSTEM = "You are a careful assistant. Answer in one sentence. " * 4
CALL = '<tool_call>\n{"name":"look","arguments":{"city":"Paris","days":3}}\n</tool_call>'
LOOK = tool("look", city="string", days="integer")

CUT_AND_SNAPSHOT = ("llama", "qwen3_next")
"""One whose state can be cut anywhere, and one that resumes at snapshots."""


def most_computed(model_type: str, new_tokens: int) -> int:
    """What may be computed where ``new_tokens`` are new: the last token of an answer was
    never read."""
    return new_tokens + (1 if model_type in ANY_PREFIX else RESUME_TOKENS)


# -- the next turn --------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_every_turn_computes_only_what_is_new(model_type):
    model = chat_model_of(model_type)
    turns = []
    with running(model) as engine:
        chat = Chat(engine, [system(SYSTEM)])
        for number in range(9):
            turns.append(chat.ask(user(f"What is the capital of France? {number}")))
    for before, turn in pairwise(turns):
        known = before.token_ids
        assert turn.prompt.token_ids[: len(known)] == tuple(known)
        new_tokens = len(turn.prompt.token_ids) - len(known)
        assert turn.computed <= most_computed(model_type, new_tokens)
        assert turn.cached + turn.computed == len(turn.prompt.token_ids)
        assert turn.end.metrics.cache_source == "memory"
        assert turn.end.metrics.cache_miss_reason is None
    assert [turn.tokens for turn in turns] == cold_tokens(model, turns)


@pytest.mark.parametrize("model_type", KINDS)
def test_every_round_of_a_tool_loop_computes_only_what_is_new(model_type):
    model = chat_model_of(model_type, QWEN)
    turns = []
    with running(model) as engine:
        chat = Chat(engine, [system("Use tools.")], [LOOK])
        news = [user("What is the weather in Paris?")]
        for number in range(10):
            made = call("look", '{"city": "Paris", "days": 3}', call_id=f"call{number:05}")
            turns.append(
                chat.ask(*news, says=CALL, reply=assistant(None, tool_calls=[made]))
            )
            news = [result(f"{number} degrees", call_id=made["id"])]
    for before, turn in pairwise(turns):
        new_tokens = len(turn.prompt.token_ids) - len(before.token_ids)
        assert 0 < new_tokens < 100
        assert turn.computed <= most_computed(model_type, new_tokens)
    assert len(turns) == 10


# -- other clients --------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_a_second_client_computes_only_its_question(model_type):
    model = chat_model_of(model_type)
    questions = ("How old is the sea?", "Write a line about Köln.")
    with running(model) as engine:
        first, second = (
            Chat(engine, [system(SYSTEM)]).ask(user(question)) for question in questions
        )
    shared = common_tokens(first.prompt.token_ids, second.prompt.token_ids)
    assert shared > 50
    own_tokens = len(second.prompt.token_ids) - shared
    assert second.computed <= most_computed(model_type, own_tokens)
    assert [second.tokens] == cold_tokens(model, [second])


@pytest.mark.parametrize("model_type", KINDS)
def test_a_third_prompt_resumes_where_two_others_parted(model_type):
    """Nothing in the messages says that this place matters: the first words of one long
    question."""
    model = chat_model_of(model_type)
    shared_text = "The capital of France is Paris. " * 7
    with running(model) as engine:
        turns = [
            Chat(engine).ask(user(shared_text + f"{letter} is the answer. " * 6))
            for letter in "xyz"
        ]
    prompts = [turn.prompt.token_ids for turn in turns]
    parted = common_tokens(prompts[0], prompts[1])
    assert common_tokens(prompts[0], prompts[2]) == parted
    assert parted > 50
    assert turns[2].cached == parted
    divergence = turns[1].end.metrics.cache_divergence
    assert divergence.index == parted
    assert divergence.sent_token == prompts[1][parted]
    assert divergence.kept_token == prompts[0][parted]
    assert [turn.tokens for turn in turns] == cold_tokens(model, turns)


@pytest.mark.parametrize("model_type", KINDS)
def test_the_same_prompt_again_computes_its_last_token(model_type):
    model = chat_model_of(model_type)
    with running(model) as engine:
        first = Chat(engine, [system(SYSTEM)]).ask(user("How old is the sea?"))
        again = generate(engine, first.prompt)
    assert again.computed <= most_computed(model_type, 0)
    assert again.tokens == first.tokens


@pytest.mark.parametrize("model_type", KINDS)
def test_another_namespace_shares_nothing(model_type):
    model = chat_model_of(model_type)
    with running(model) as engine:
        first = Chat(engine, [system(SYSTEM)]).ask(user("Hi"), namespace="one")
        other = generate(engine, first.prompt, namespace="other")
        mine = generate(engine, first.prompt, namespace="one")
    assert other.cached == 0
    assert other.end.metrics.cache_miss_reason == "never_seen"
    assert mine.cached > 0
    assert first.tokens == other.tokens == mine.tokens


# -- what clients do to a conversation ------------------------------------------


@pytest.mark.parametrize("model_type", CUT_AND_SNAPSHOT)
def test_thinking_that_is_stripped_costs_the_answer_and_no_more(model_type):
    model = chat_model_of(model_type, THINKING)
    reply = assistant("Paris is it.", reasoning_content="France, so Paris.")
    with running(model) as engine:
        chat = Chat(engine, [system(SYSTEM)])
        first = chat.ask(
            user("What is the capital of France?"),
            says="<think>\nFrance, so Paris.\n</think>\n\nParis is it.",
            reply=reply,
        )
        second = chat.ask(user("And of Italy?"))
    parted = common_tokens(first.token_ids, second.prompt.token_ids)
    assert len(first.prompt.token_ids) - 8 < parted < len(first.token_ids)
    own_tokens = len(second.prompt.token_ids) - parted
    assert second.computed <= most_computed(model_type, own_tokens)
    metrics = second.end.metrics
    assert metrics.cache_miss_reason == "diverged"
    assert metrics.cache_divergence.index == parted
    assert metrics.cache_divergence.kept_token == first.token_ids[parted]
    assert metrics.cache_divergence.sent_token == second.prompt.token_ids[parted]
    assert [second.tokens] == cold_tokens(model, [second])


@pytest.mark.parametrize("model_type", CUT_AND_SNAPSHOT)
@pytest.mark.parametrize(
    "arguments",
    ['{"city":"Paris","days":3}', '{ "days": 3,\n  "city": "Paris" }'],
    ids=["no spaces", "another order"],
)
def test_arguments_that_are_written_otherwise_are_the_same_call(model_type, arguments):
    model = chat_model_of(model_type, QWEN)
    reply = assistant(None, tool_calls=[call("look", arguments)])
    with running(model) as engine:
        chat = Chat(engine, tools=[LOOK])
        first = chat.ask(user("What is the weather in Paris?"), says=CALL, reply=reply)
        second = chat.ask(result("20 degrees"))
    new_tokens = len(second.prompt.token_ids) - len(first.token_ids)
    assert second.computed <= most_computed(model_type, new_tokens)
    assert second.end.metrics.cache_divergence is None
    assert [second.tokens] == cold_tokens(model, [second])


@pytest.mark.parametrize("model_type", CUT_AND_SNAPSHOT)
def test_another_argument_is_another_call(model_type):
    model = chat_model_of(model_type, QWEN)
    made = call("look", '{"city": "Paris", "days": 3}')
    with running(model) as engine:
        chat = Chat(engine, tools=[LOOK])
        reply = assistant(None, tool_calls=[made])
        first = chat.ask(user("What is the weather in Paris?"), says=CALL, reply=reply)
        chat.messages[-1] = assistant(
            None, tool_calls=[call("look", '{"city": "Paris", "days": 4}')]
        )
        second = chat.ask(result("20 degrees"))
    parted = common_tokens(first.token_ids, second.prompt.token_ids)
    assert parted >= len(first.prompt.token_ids) - 1
    own_tokens = len(second.prompt.token_ids) - parted
    assert second.computed <= most_computed(model_type, own_tokens)
    assert second.end.metrics.cache_divergence.index == parted
    assert second.end.metrics.cache_miss_reason is not None


@pytest.mark.parametrize("model_type", CUT_AND_SNAPSHOT)
def test_tools_whose_keys_come_in_another_order_are_the_same_tools(model_type):
    model = chat_model_of(model_type, QWEN)
    function = LOOK["function"]
    shuffled = {
        "function": {
            key: dict(reversed(value.items())) if isinstance(value, dict) else value
            for key, value in reversed(function.items())
        },
        "type": "function",
    }
    assert shuffled == LOOK
    with running(model) as engine:
        first = Chat(engine, tools=[LOOK]).ask(user("What is the weather?"))
        second = Chat(engine, tools=[shuffled]).ask(user("What is the weather?"))
    assert second.prompt == first.prompt
    assert second.computed <= most_computed(model_type, 0)


@pytest.mark.parametrize("model_type", CUT_AND_SNAPSHOT)
def test_a_tool_that_changed_is_named_as_where_prompts_part(model_type):
    model = chat_model_of(model_type, QWEN)
    changed = copy.deepcopy(LOOK)
    changed["function"]["parameters"]["properties"]["days"]["type"] = "string"
    talk = [system(SYSTEM), user("What is the weather?")]
    with running(model) as engine:
        first = Chat(engine, tools=[LOOK]).ask(*talk)
        second = Chat(engine, tools=[changed]).ask(*talk)
        third = Chat(engine, tools=[changed]).ask(system(SYSTEM), user("And tomorrow?"))
    parted = common_tokens(first.prompt.token_ids, second.prompt.token_ids)
    metrics = second.end.metrics
    assert metrics.cache_divergence.index == parted
    assert metrics.cache_lost_tokens > 0
    if model_type in ANY_PREFIX:
        assert second.cached == parted
        assert metrics.cache_miss_reason == "diverged"
    else:
        # Nobody could know that prompts part inside a tool.
        assert metrics.cache_miss_reason == "no_snapshot"
    assert third.cached > parted
    assert [second.tokens, third.tokens] == cold_tokens(model, [second, third])
