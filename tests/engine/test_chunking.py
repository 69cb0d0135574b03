"""Whether a model can be read in spans is found out, and what follows where it can't."""

from __future__ import annotations

import dataclasses
import logging
import re

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtplx.engine.chunking import chunking_problem
from mtplx.errors import InvalidRequestError
from mtplx.models import Model
from tests.engine.harness import PROMPT, Client, greedy_reference, request, run
from tests.tiny_models import (
    CONFIGS,
    chat_model,
    make_network,
    one_pass_logits,
    tiny_model,
)


class Forgetful(nn.Module):
    """A network that looks at what it is given, and never at its cache."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def __call__(self, inputs, cache=None):
        return self.network(inputs)

    @property
    def layers(self):
        return self.network.layers

    @property
    def make_cache(self):
        return self.network.make_cache


class ReadsOnce(Forgetful):
    """A network that refuses a second part."""

    def __call__(self, inputs, cache=None):
        if cache is not None and cache[0].offset and inputs.shape[1] > 1:
            raise ValueError("one part only")
        return self.network(inputs, cache=cache)


class NotANumber(Forgetful):
    def __call__(self, inputs, cache=None):
        return self.network(inputs, cache=cache) * mx.nan


def chat_with(kind, plain: Model | None = None) -> Model:
    plain = plain or chat_model()
    return Model(kind(plain.network), plain.config, plain.tokenizer, name=kind.__name__)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_kind_of_cache_can_be_read_in_spans(model_type):
    assert chunking_problem(tiny_model(model_type)) is None


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_is_no_problem(dtype):
    network = make_network(CONFIGS["llama"])
    network.set_dtype(dtype)
    name = str(dtype).removeprefix("mlx.core.")
    assert chunking_problem(Model(network, CONFIGS["llama"], dtype=name)) is None


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Forgetful, r"^in two parts its logits are off by [0-9.]+ of the largest$"),
        (ReadsOnce, r"^ValueError: one part only$"),
        (NotANumber, r"^in two parts its logits are off by nan of the largest$"),
    ],
)
def test_what_cannot_be_read_in_spans_says_why(kind, problem):
    found = chunking_problem(chat_with(kind))
    assert found is not None
    assert re.search(problem, found)


@pytest.fixture
def forgetful(start):
    """An engine whose model cannot be read in spans."""
    return start(
        chat_with(Forgetful), max_num_batched_tokens=300, prefill_window=16, tail_grid=8
    )


def test_the_engine_says_so_once(start, caplog):
    engine = start(chat_with(Forgetful))
    run(engine, PROMPT[:20])
    (record,) = [r for r in caplog.records if "in spans" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Forgetful cannot be read in spans (in two parts")
    status = engine.status()
    assert not status.chunked_prefill
    assert "in two parts its logits are off" in status.chunked_prefill_reason


def test_its_prompts_are_read_whole(forgetful):
    """The first token shows it: it is that of one pass over the whole prompt."""
    prompt = PROMPT[:40]
    expected = int(mx.argmax(one_pass_logits(chat_model(), prompt)[-1]))
    client, end = run(forgetful, prompt, tokens=1)
    assert client.tokens == [expected]
    assert (end.metrics.prefill_chunks, end.metrics.prefill_chunk_size) == (1, 40)


def test_edges_do_not_split_them_either(start):
    wrapper = chat_model().tokenizer
    config = {**CONFIGS["qwen3_next"], "vocab_size": len(wrapper)}
    plain = Model(make_network(config), config, wrapper)
    asked = request(PROMPT[:40], tokens=1)
    prompt = dataclasses.replace(asked.prompt, edges=(10, 25), stable_prefix_len=25)
    expected = int(mx.argmax(one_pass_logits(plain, PROMPT[:40])[-1]))
    engine, client = start(chat_with(Forgetful, plain)), Client()
    engine.submit(dataclasses.replace(asked, prompt=prompt), client)
    assert client.end().metrics.prefill_chunks == 1
    assert client.tokens == [expected]


def test_nothing_of_it_is_reused(forgetful):
    for _ in range(2):
        _, end = run(forgetful, PROMPT[:20])
        assert end.metrics.cached_tokens == 0
        assert end.metrics.new_prefill_tokens == 20
        assert end.metrics.cache_miss_reason == "disabled"
    assert forgetful.status().bank_tokens == 0


def test_long_prompts_are_refused_at_once(start):
    engine = start(
        chat_with(Forgetful), max_num_batched_tokens=100, max_num_seqs=5, prefill_window=16
    )
    client = Client()
    with pytest.raises(InvalidRequestError, match=r"97 tokens.* at most 96 at once"):
        engine.submit(request([5] * 97), client)
    assert client.events.empty()
    _, end = run(engine, [5] * 96, tokens=1)
    assert end.metrics.prompt_tokens == 96


def test_switched_off_it_still_reuses_state(start):
    engine = start(enable_chunked_prefill=False, max_num_batched_tokens=200, max_num_seqs=5)
    status = engine.status()
    assert not status.chunked_prefill
    assert status.chunked_prefill_reason == "switched off by enable_chunked_prefill"
    with pytest.raises(
        InvalidRequestError, match=r"at most 196 at once \(max_num_batched_tokens=200"
    ) as caught:
        engine.submit(request([5] * 197), Client())
    assert caught.value.param == "messages"
    assert engine.status().waiting == 0
    run(engine, PROMPT)
    again, end = run(engine, PROMPT)
    assert end.metrics.cached_tokens == len(PROMPT) - 1
    assert again.tokens == greedy_reference(PROMPT, 12)
