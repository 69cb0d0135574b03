"""Log-probabilities are the model's own, and no span, batch or setting changes them."""

from __future__ import annotations

import io
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from mtplx.engine.logprobs import PromptScores, score
from mtplx.types import PromptLogprobs, SamplingParams, TextDelta
from tests.engine.harness import PROMPT, Client, greedy_reference, request, run
from tests.tiny_models import chat_model, one_pass_logits

LOGITS = np.log(np.array([[0.5, 0.25, 0.15, 0.1], [0.1, 0.15, 0.25, 0.5]])) + 3
TOLERANCE = 1e-4


@cache
def log_softmax(token_ids):
    """Return ``[n, vocab]`` of one forward over all tokens: the reference."""
    logits = np.array(one_pass_logits(chat_model(), list(token_ids)), dtype=np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def assert_scored(entries, prompt, answer, top):
    """Assert that the entries are those of the answer after the prompt."""
    assert [entry.token_id for entry in entries] == list(answer)
    rows = log_softmax((*prompt, *answer))[len(prompt) - 1 : -1]
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=TOLERANCE)
        told = [logprob for _, logprob in entry.top]
        assert told == pytest.approx(sorted(row)[::-1][:top], abs=TOLERANCE)
        assert all(row[token] == pytest.approx(p, abs=TOLERANCE) for token, p in entry.top)
        assert len({token for token, _ in entry.top}) == len(entry.top) == top


def entries(deltas):
    """Return the log-probabilities of an answer, which stand beside its tokens."""
    for delta in deltas:
        assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
    return [entry for delta in deltas for entry in delta.logprobs]


def answer(client):
    """Return the deltas and the end."""
    deltas = []
    while isinstance(event := client.next(), TextDelta):
        deltas.append(event)
    return deltas, event


# -- the function ---------------------------------------------------------------


def test_scores_are_those_of_a_log_softmax():
    logits = mx.array(LOGITS, dtype=mx.float32)
    first, second = score(logits, mx.array([3, 3]), top=2).read()
    assert (first.token_id, second.token_id) == (3, 3)
    assert first.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert second.logprob == pytest.approx(np.log(0.5), abs=1e-6)
    assert [token for token, _ in first.top] == [0, 1]
    assert [token for token, _ in second.top] == [3, 2]
    assert [p for _, p in first.top] == pytest.approx(np.log([0.5, 0.25]), abs=1e-6)


@pytest.mark.parametrize(("top", "told"), [(0, 0), (1, 1), (3, 3), (4, 4), (20, 4)])
def test_no_more_tokens_are_told_than_there_are(top, told):
    (entry,) = score(mx.array(LOGITS[:1]), mx.array([1]), top).read()
    assert [token for token, _ in entry.top] == [0, 1, 2, 3][:told]


def test_equals_stand_in_the_order_of_their_ids():
    (entry,) = score(mx.zeros((1, 50)), mx.array([7]), 50).read()
    assert [token for token, _ in entry.top] == list(range(50))


def test_half_precision_is_scored_in_float32():
    """A norm in float16 would round 11.09 to a step of 0.0078."""
    (entry,) = score(mx.zeros((1, 65536), mx.float16), mx.array([0]), 0).read()
    assert entry.logprob == pytest.approx(-np.log(65536), abs=1e-5)


def test_evaluating_the_tokens_evaluates_their_scores():
    logits = mx.random.normal((2, 40))
    scores = score(logits, mx.array([3, 30]), top=2)
    assert operations(scores)
    mx.eval(scores.computed_with(scores.token_ids))
    assert operations(scores) == 0


def operations(arrays):
    """Return how many are still to be done for the arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return graph.getvalue().count("rectangle")


# -- a prompt -------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(), (1,), (59,), (7, 8, 30), tuple(range(1, 60))])
def test_a_prompt_is_scored_the_same_however_it_is_cut(cuts):
    logits = one_pass_logits(chat_model(), PROMPT)
    scores = PromptScores(tuple(PROMPT), top=3)
    for start, end in zip((0, *cuts), (*cuts, len(PROMPT)), strict=True):
        scores.add(logits[start:end], start)
        assert len(scores.tokens) == min(end + 1, len(PROMPT))
    assert scores.complete
    assert scores.tokens[0] is None
    assert_scored(scores.tokens[1:], PROMPT[:1], PROMPT[1:], top=3)


def test_a_prompt_of_one_token_has_nothing_to_score():
    scores = PromptScores((5,), top=2)
    scores.add(one_pass_logits(chat_model(), [5]), 0)
    assert scores.tokens == [None]
    assert scores.complete


# -- the engine -----------------------------------------------------------------

SETTINGS = {
    "alone": {"max_num_seqs": 1},
    "together": {"max_num_seqs": 8},
    "in small spans": {"max_num_seqs": 8, "prefill_window": 16},
}
REQUESTS = {
    "greedy": (SamplingParams(temperature=0), 5),
    "sampled": (SamplingParams(seed=3, top_p=0.9), 0),
    "bent": (
        SamplingParams(
            seed=4,
            temperature=1.7,
            top_k=30,
            repetition_penalty=1.3,
            logit_bias=((9, 100.0), (11, 99.0)),
        ),
        2,
    ),
    "silent": (SamplingParams(seed=5), None),
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_answer_is_scored_by_the_model_alone(start, settings):
    engine = start(**settings)
    clients = {}
    for index, (name, (sampling, top)) in enumerate(REQUESTS.items()):
        clients[name] = Client()
        prompt = PROMPT[index : 40 + 5 * index]
        more = {"sampling": sampling, "logprobs": top, "request_id": name}
        engine.submit(request(prompt, **more), clients[name])
    for index, (name, (_, top)) in enumerate(REQUESTS.items()):
        deltas, _ = answer(clients[name])
        tokens = clients[name].tokens
        assert len(tokens) == 12
        if top is None:
            assert all(delta.logprobs == () for delta in deltas)
        else:
            assert_scored(entries(deltas), PROMPT[index : 40 + 5 * index], tokens, top)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_prompts_are_scored_beside_streams(start, settings):
    engine = start(**settings)
    run(engine, PROMPT)  # What is known of the prompts must not be restored.
    stream, scored = Client(), Client()
    engine.submit(request(PROMPT[7:], request_id="stream", tokens=30), stream)
    more = {"tokens": 2, "logprobs": 1, "prompt_logprobs": True}
    engine.submit(request(PROMPT, request_id="scored", **more), scored)
    prompt = scored.next()
    assert isinstance(prompt, PromptLogprobs)
    assert prompt.tokens[0] is None
    assert_scored(prompt.tokens[1:], PROMPT[:1], PROMPT[1:], top=1)
    deltas, end = answer(scored)
    assert_scored(entries(deltas), PROMPT, scored.tokens, top=1)
    assert end.metrics.cached_tokens == 0
    stream.end()
    assert stream.tokens == greedy_reference(PROMPT[7:], 30)
