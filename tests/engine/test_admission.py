"""Who waits for whom: a prompt that is being read is not read again beside it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from mtplx.errors import DeadlineExceededError, GenerationError
from mtplx.types import (
    Failed,
    Finished,
    PrefillProgress,
    Prompt,
    PromptLogprobs,
    SamplingParams,
    TextDelta,
)
from tests.engine.conversation import (
    KINDS,
    RESUME_TOKENS,
    Turn,
    chat_model_of,
    cold_tokens,
    common_tokens,
    generate,
    prompt_of,
    request_for,
    running,
)
from tests.engine.harness import (
    TIMEOUT_S,
    Client,
    greedy_reference,
    request,
    touchy,
)
from tests.text.tokenizers_factory import system, user
from tests.tiny_models import ANY_PREFIX

PROMPT = [*prompt_of(200).token_ids]
SHORT = [*PROMPT[:150], 9, 8, 7]
"""Begins as ``PROMPT`` does, and would be read before it."""

SPAN = 16
SETTINGS = {"prefill_window": SPAN, "max_num_seqs": 8}


@dataclass
class At(Client):
    """Does something on the engine thread when so much of its prompt has been read."""

    def __init__(self, done_tokens, action):
        super().__init__()
        self._done_tokens, self._action = done_tokens, action

    def __call__(self, event):
        super().__call__(event)
        read = isinstance(event, PrefillProgress) and event.done_tokens
        if self._action and read is not False and read >= self._done_tokens:
            action, self._action = self._action, None
            action()


def submit_together(engine, prompts) -> list[Client]:
    """Submit requests that the engine finds at once, after an iteration for another."""
    clients = [Client() for _ in prompts]

    def submit():
        for prompt, client in zip(prompts, clients, strict=True):
            engine.submit(request_for(engine, prompt), client)

    before = At(0, submit)
    engine.submit(request([9], request_id="before", tokens=1), before)
    before.end()
    return clients


def submit_both(engine, network, first, second, *, prompts=(PROMPT, PROMPT), **more):
    """Submit ``second`` while the first span of ``first`` is held up."""
    network.hold_up()
    engine.submit(request(prompts[0], request_id="first"), first)
    assert network.entered.get(timeout=TIMEOUT_S) == (1, SPAN)
    engine.submit(request(prompts[1], request_id="second", **more), second)
    network.gate.set()


def test_an_identical_request_waits_for_the_one_that_reads(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    seen = []
    first = At(SPAN * 3, lambda: seen.append(engine.status()))
    second = Client()
    submit_both(engine, network, first, second)
    ends = [client.end() for client in (first, second)]
    assert (seen[0].running, seen[0].waiting) == (1, 1)
    assert [end.metrics.new_prefill_tokens for end in ends] == [200, 1]
    assert first.tokens == second.tokens == greedy_reference(PROMPT, 12)
    read = 0
    while not network.entered.empty():
        rows, tokens = network.entered.get()
        read += tokens if rows == 1 and tokens > 1 else 0
    assert read <= 200


def test_a_prompt_with_the_same_beginning_waits_for_the_beginning(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    seen = []
    first = At(SPAN * 3, lambda: seen.append(engine.status()))
    second = Client()
    submit_both(engine, network, first, second, prompts=(PROMPT, SHORT))
    ends = [client.end() for client in (first, second)]
    assert (seen[0].running, seen[0].waiting) == (1, 1)
    assert [end.metrics.new_prefill_tokens for end in ends] == [200, 3]
    assert second.tokens == greedy_reference(SHORT, 12)


def test_few_tokens_are_not_waited_for(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    seen = []
    first = Client()
    second = At(0, lambda: seen.append(engine.status()))
    other = [*PROMPT[:60], 9, 8, 7]
    submit_both(engine, network, first, second, prompts=(PROMPT, other))
    for client in (first, second):
        assert client.end().reason == "length"
    assert (seen[0].running, seen[0].waiting) == (2, 0)
    assert second.tokens == greedy_reference(other, 12)


@pytest.mark.parametrize("more", [{"namespace": "other"}, {"prompt_logprobs": True}])
def test_what_cannot_be_shared_is_not_waited_for(start, more):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    seen = []
    first = Client()
    second = At(0, lambda: seen.append(engine.status()))
    submit_both(engine, network, first, second, prompts=(PROMPT, SHORT), **more)
    end = first.end()
    assert isinstance(
        second.next(), PromptLogprobs if "prompt_logprobs" in more else TextDelta
    )
    assert end.metrics.new_prefill_tokens == 200
    assert second.end().metrics.new_prefill_tokens == len(SHORT)
    assert (seen[0].running, seen[0].waiting) == (2, 0)


@pytest.mark.parametrize("model_type", KINDS)
def test_samples_of_one_prompt_read_it_once(model_type):
    model = chat_model_of(model_type)
    prompt = Prompt(tuple(PROMPT))
    with running(model, **SETTINGS) as engine:
        clients = submit_together(engine, [prompt] * 4)
        ends = [client.end() for client in clients]
    most = 1 if model_type in ANY_PREFIX else RESUME_TOKENS
    assert sorted(end.metrics.new_prefill_tokens for end in ends)[-1] == 200
    assert sum(end.metrics.new_prefill_tokens for end in ends) <= 200 + 3 * most
    turns = [Turn(prompt, c.tokens, c.text, e) for c, e in zip(clients, ends, strict=True)]
    assert [turn.tokens for turn in turns] == cold_tokens(model, turns)


@pytest.mark.parametrize("model_type", KINDS)
def test_clients_that_come_at_once_read_their_system_prompt_once(model_type):
    model = chat_model_of(model_type)
    text = "You are a careful assistant. Answer in one sentence. " * 8
    questions = ("How old is the sea?", "Write a line about Köln.", "def read(path)")
    with running(model, **SETTINGS) as engine:
        prompts = [engine.tokenizer.render_chat([system(text), user(q)]) for q in questions]
        clients = submit_together(engine, prompts)
        ends = [client.end() for client in clients]
    turns = [
        Turn(p, c.tokens, c.text, e) for p, c, e in zip(prompts, clients, ends, strict=True)
    ]
    shared = common_tokens(prompts[0].token_ids, prompts[1].token_ids)
    assert shared > 64
    computed = sum(turn.computed for turn in turns)
    own = sum(len(prompt.token_ids) - shared for prompt in prompts)
    # A few tokens are not waited for, also where they are the last of many.
    assert computed <= shared + own + 2 * RESUME_TOKENS
    assert [turn.tokens for turn in turns] == cold_tokens(model, turns)


# -- the one that reads ends early ----------------------------------------------


def test_after_a_cancel_the_one_that_waits_goes_on_from_what_was_read(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    first = At(SPAN * 3, lambda: engine.cancel("first"))
    second = Client()
    submit_both(engine, network, first, second, prompts=(PROMPT, SHORT))
    assert first.end() == Finished("cancelled", 0, None)
    end = second.end()
    assert end.metrics.cached_tokens == SPAN * 3
    assert second.tokens == greedy_reference(SHORT, 12)


def test_after_a_failure_the_one_that_waits_goes_on_from_what_was_read(start):
    network, model = touchy(raises_on=300)
    engine = start(model, **SETTINGS)
    bad = [*PROMPT[:120], 300, *PROMPT[120:]]
    first, second = Client(), Client()
    submit_both(engine, network, first, second, prompts=(bad, SHORT))
    failed = first.end()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, GenerationError)
    end = second.end()
    assert end.metrics.cached_tokens == 120 // SPAN * SPAN
    assert second.tokens == greedy_reference(SHORT, 12)


# -- the one that waits ends early ----------------------------------------------


def test_one_that_waits_for_another_can_be_cancelled(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    second = Client()
    first = At(SPAN * 3, lambda: engine.cancel("second"))
    submit_both(engine, network, first, second, prompts=(PROMPT, SHORT))
    assert second.end() == Finished("cancelled", 0, None)
    assert not second.progress
    assert first.end().reason == "length"
    assert first.tokens == greedy_reference(PROMPT, 12)


def test_one_that_waits_for_another_expires(start):
    network, model = touchy()
    engine = start(model, **SETTINGS)
    deadline_s = time.perf_counter() + 0.05

    def outlast():
        while time.perf_counter() <= deadline_s:
            pass

    first, second = At(SPAN * 3, outlast), Client()
    prompts = (PROMPT, SHORT)
    submit_both(engine, network, first, second, prompts=prompts, deadline_s=deadline_s)
    end = second.end()
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeadlineExceededError)
    assert not second.progress
    assert first.end().reason == "length"


def test_seeds_differ_where_the_prompt_is_shared():
    model = chat_model_of("llama")
    prompt = Prompt(tuple(PROMPT))
    sampled = []
    with running(model, **SETTINGS) as engine:
        clients = [Client() for _ in range(3)]
        for seed, client in enumerate(clients):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            engine.submit(request(PROMPT, request_id=f"{seed}", sampling=sampling), client)
        for client in clients:
            assert client.end().reason == "length"
            sampled.append(tuple(client.tokens))
        assert generate(engine, prompt).computed == 1
    assert len(set(sampled)) == 3
