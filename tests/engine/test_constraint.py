"""A grammar holds its own answer, whatever is drawn, and touches no other."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import Executor, Future
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher

from mtplx.engine.constraint import Constraint, Grammars
from mtplx.errors import GenerationError
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Failed, SamplingParams, TextDelta
from tests.engine.harness import PROMPT, Client, greedy_reference, request, run
from tests.engine.test_logprobs import assert_scored
from tests.tiny_models import chat_model

PATTERN = r"(yes|no|perhaps), [a-z]{2,9}[0-9]{1,3}"
REGEX = LLMatcher.grammar_from_regex(PATTERN)
SCHEMA = LLMatcher.grammar_from_json_schema(
    {
        "type": "object",
        "properties": {
            "city": {"enum": ["Köln", "Paris", "日本"]},
            "sizes": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 99},
                "maxItems": 3,
            },
        },
        "required": ["city", "sizes"],
        "additionalProperties": False,
    },
    overrides={"whitespace_flexible": False},
)
UNKNOWN_RULE = 'start: "a" nowhere'


@cache
def tokenizer():
    return Tokenizer(chat_model().tokenizer)


@cache
def grammars():
    return Grammars(tokenizer().grammar_vocabulary(chat_model().vocab_size))


@pytest.fixture
def engine(start):
    return start(prefill_window=16, max_num_seqs=8)


def token_ids(text):
    return tokenizer().encode(text, add_special_tokens=False)


def end_tokens():
    return tokenizer().eos_token_ids


def allowed(constraint):
    """Return the ids of the tokens that may come next."""
    mask = np.array(constraint.allowed())
    assert mask.shape == (chat_model().vocab_size,)
    return set(np.flatnonzero(mask).tolist())


def follow(constraint, text):
    """Take the text, and say whether the last token completed the answer."""
    for token in token_ids(text):
        assert token in allowed(constraint)
        complete = constraint.advance(token)
    return complete


# -- one answer -----------------------------------------------------------------


def test_what_may_come_first_begins_the_grammar():
    heads = allowed(grammars().constrain(LLMatcher.grammar_from_regex("(no|perhaps)x")))
    assert heads
    for token in range(chat_model().vocab_size):
        text = tokenizer().decode([token])
        begins = bool(text) and any(f"{w}x".startswith(text) for w in ("no", "perhaps"))
        assert (token in heads) == begins, text


def test_the_end_is_allowed_exactly_where_the_answer_is_complete():
    constraint = grammars().constrain(LLMatcher.grammar_from_regex("(ab){1,2}"))
    ends = []
    for token in token_ids("abab"):
        ends.append(bool(allowed(constraint) & end_tokens()))
        complete = constraint.advance(token)
    assert ends == [False, False, True, False]
    assert complete


def test_an_answer_that_nothing_can_follow_is_complete_without_an_end_token():
    assert follow(grammars().constrain(REGEX), "yes, please123")
    assert not follow(grammars().constrain(REGEX), "yes, please12")


def test_an_end_token_completes_it():
    constraint = grammars().constrain(REGEX)
    follow(constraint, "no, thanks4")
    assert constraint.advance(min(allowed(constraint) & end_tokens()))


def test_answers_to_one_grammar_do_not_meet():
    one, other = grammars().constrain(REGEX), grammars().constrain(REGEX)
    follow(one, "yes, ")
    assert token_ids("n")[0] in allowed(other)
    follow(other, "perhaps, never1")


def test_a_forbidden_token_is_an_error():
    constraint = grammars().constrain(REGEX)
    allowed(constraint)
    with pytest.raises(GenerationError, match="held to its grammar"):
        constraint.advance(token_ids("z")[0])


def test_a_broken_grammar_is_an_error_that_says_why():
    with pytest.raises(GenerationError, match="nowhere"):
        grammars().constrain(UNKNOWN_RULE).allowed()


class Later(Executor):
    """Does its work when it is told to."""

    def __init__(self):
        self.jobs = []

    def submit(self, job):
        future = Future()
        self.jobs.append((future, job))
        return future

    def work(self):
        while self.jobs:
            future, job = self.jobs.pop()
            future.set_result(job())


def test_masks_are_made_by_workers_while_the_engine_does_something_else():
    vocabulary = tokenizer().grammar_vocabulary(chat_model().vocab_size)
    workers = Later()
    constraint = Constraint(REGEX, vocabulary, workers)
    for token in token_ids("yes, "):
        (_,) = workers.jobs
        workers.work()
        assert token in allowed(constraint)
        constraint.advance(token)
    (_,) = workers.jobs


# -- the engine -----------------------------------------------------------------


def sampled(engine, grammar, seed, **more):
    return run(
        engine,
        PROMPT,
        tokens=300,
        grammar=grammar,
        ignore_eos=False,
        sampling=SamplingParams(seed=seed, temperature=1.0, **more),
    )


def test_every_answer_matches_the_grammar(engine):
    texts = set()
    for seed in range(20):
        client, end = sampled(engine, REGEX, seed)
        assert re.fullmatch(PATTERN, client.text), client.text
        assert end.reason == "stop"
        assert end.completion_tokens == len(client.tokens)
        texts.add(client.text)
    assert len(texts) > 15


def test_every_answer_is_json_of_the_schema(engine):
    for seed in range(20):
        client, end = sampled(engine, SCHEMA, seed)
        value = json.loads(client.text)
        assert value.keys() == {"city", "sizes"}
        assert value["city"] in ("Köln", "Paris", "日本")
        assert all(0 <= size <= 99 for size in value["sizes"])
        assert end.reason == "stop"


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 1},
        {"top_p": 0.05, "min_p": 0.9},
        {"logit_bias": ((token_ids("z")[0], 100.0),), "repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0, "top_k": 5, "top_p": 0.7},
    ],
)
def test_other_settings_choose_among_what_the_grammar_allows(engine, more):
    texts = [sampled(engine, REGEX, seed, **more)[0].text for seed in (1, 1, 2)]
    assert all(re.fullmatch(PATTERN, text) for text in texts)
    assert texts[0] == texts[1]


def test_an_answer_may_end_where_it_likes_and_must_where_it_is_complete(engine):
    digits = LLMatcher.grammar_from_regex("[0-9]{1,40}")
    ends = {
        sampled(engine, digits, seed)[0].tokens[-1] in end_tokens() for seed in range(9)
    }
    assert True in ends
    _, end = run(engine, PROMPT, tokens=300, grammar=digits, ignore_eos=True)
    assert end.reason == "stop"


def test_an_answer_that_is_cut_off_says_so(engine):
    client, end = run(engine, PROMPT, tokens=2, grammar=SCHEMA)
    assert end.reason == "length"
    assert len(client.tokens) == 2


def test_logprobs_are_those_of_the_model_without_the_grammar(engine):
    client = Client()
    engine.submit(request(PROMPT, tokens=300, grammar=REGEX, logprobs=3), client)
    entries = []
    while isinstance(event := client.next(), TextDelta):
        entries += event.logprobs
    assert_scored(entries, PROMPT, client.tokens, top=3)
    assert any(entry.token_id not in dict(entry.top) for entry in entries)


def test_others_are_not_touched(engine):
    """One whose grammar is broken, two that are held, two that are free."""
    alone = sampled(engine, SCHEMA, 7)[0].text
    free = SamplingParams(seed=3)
    drawn_alone = run(engine, PROMPT[5:], sampling=free)[0].tokens
    requests = {
        "free": request(PROMPT, tokens=12),
        "broken": request(PROMPT, grammar=UNKNOWN_RULE),
        "held": request(
            PROMPT, tokens=300, grammar=SCHEMA, sampling=SamplingParams(seed=7)
        ),
        "drawn": request(PROMPT[5:], sampling=free),
        "matched": request(
            PROMPT[9:], tokens=300, grammar=REGEX, sampling=SamplingParams(seed=1)
        ),
    }
    clients = {}
    for name, each in requests.items():
        clients[name] = Client()
        engine.submit(dataclasses.replace(each, request_id=name), clients[name])
    ends = {name: client.end() for name, client in clients.items()}
    assert isinstance(ends["broken"], Failed)
    assert isinstance(ends["broken"].error, GenerationError)
    assert clients["broken"].tokens == []
    assert clients["free"].tokens == greedy_reference(PROMPT, 12)
    assert clients["drawn"].tokens == drawn_alone
    assert clients["held"].text == alone
    assert re.fullmatch(PATTERN, clients["matched"].text)
