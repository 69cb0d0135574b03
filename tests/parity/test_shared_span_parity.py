"""A span in the forward of a decode = the same span alone, and so for the rows beside it.

Each test also proves that the forward was shared, or that it was not.
"""

from __future__ import annotations

from contextlib import contextmanager

import mlx.core as mx
import pytest

from mtplx.generation import PromptPrefill, restore_or_prefill_prompt_state
from mtplx.models import Model
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache, restore_cache, take_snapshot
from mtplx.models.forward import SharedSpan
from mtplx.session import SessionBank
from mtplx.types import Prompt
from tests.tiny_models import (
    CONFIGS,
    WINDOW,
    make_network,
    one_pass_logits,
    prompt_ids,
    tiny_model,
)

TOLERANCE = 1e-4
SHARING = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")
ALONE = tuple(name for name in CONFIGS if name not in SHARING)

ROW_LENGTHS = (5, WINDOW, 2 * WINDOW + 3)
"""Of the prompts of the rows: below, at and beyond the sliding window."""

PLANS = {
    "one by one": [1, 1, 1, 2],
    "short": [7, 7, 7],
    "a window": [WINDOW, WINDOW, WINDOW],
    "beyond a window": [WINDOW + 1, WINDOW + 1, 5],
    "mixed": [1, 7, WINDOW, WINDOW + 1, 1],
    "long": [3, 3 * WINDOW, 2 * WINDOW + 1],
}
"""Lengths of the spans in which the prompt beside the rows is read."""

POISON = 99


class Rows:
    """Streams beside a prompt; each is told what to read, so that one pass can check it."""

    def __init__(self, model: Model, count: int) -> None:
        self.model = model
        self.tokens = [prompt_ids(ROW_LENGTHS[row], seed=row) for row in range(count)]
        self.caches: list[PromptCache] = []
        self.logits: list[list[mx.array]] = [[] for _ in range(count)]
        for tokens in self.tokens:
            cache = model.new_cache()
            model.decode(cache, 0, token_ids=tokens)
            self.caches.append(cache)

    def step(self, decoder: BatchDecoder, span: SharedSpan | None) -> None:
        following = [(7 * len(tokens) + 3) % 90 for tokens in self.tokens]
        assert decoder.decode(self.caches, following, span) == {}
        for row, token in enumerate(following):
            self.tokens[row].append(token)
            self.logits[row].append(self.caches[row].logits)

    def check(self) -> None:
        for tokens, cache, logits in zip(
            self.tokens, self.caches, self.logits, strict=True
        ):
            assert cache.offset == len(tokens)
            assert cache.pending is None
            check(mx.stack(logits), one_pass_logits(self.model, tokens)[-len(logits) :])


def check(found: mx.array, reference: mx.array) -> None:
    assert found.shape == reference.shape
    assert not mx.isnan(found).any()
    assert mx.abs(found - reference).max() < TOLERANCE
    assert mx.argmax(found, -1).tolist() == mx.argmax(reference, -1).tolist()


@contextmanager
def counted_forwards(model: Model):
    """Give the number of rows of each forward inside the block."""
    kind = type(model.network)
    counts: list[int] = []

    def call(self, inputs, *args, **kwargs):
        counts.append(inputs.shape[0])
        return kind.__call__(self, inputs, *args, **kwargs)

    model.network.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield counts
    finally:
        model.network.__class__ = kind


def read_beside(
    decoder: BatchDecoder,
    rows: Rows,
    cache: PromptCache,
    prompt: list[int],
    lengths: list[int],
) -> None:
    """Read the rest of ``prompt`` in spans, one in each step of the rows."""
    assert cache.offset + sum(lengths) == len(prompt)
    for length in lengths:
        end = cache.offset + length
        tail = end == len(prompt)
        rows.step(decoder, SharedSpan(cache, prompt[cache.offset : end], tail))
        assert cache.offset == end
        assert cache.pending is None
        assert (cache.logits is not None) == tail


def test_these_models_take_spans():
    taking = {name for name in CONFIGS if BatchDecoder(tiny_model(name)).takes_spans}
    assert taking == set(SHARING)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model_type", SHARING)
def test_a_prompt_read_beside_streams_is_one_pass(model_type, plan):
    model = tiny_model(model_type)
    decoder, lengths = BatchDecoder(model), PLANS[plan]
    prompt = prompt_ids(sum(lengths), seed=5)
    rows = Rows(model, 2 + len(lengths) % 2)
    cache = model.new_cache()
    with counted_forwards(model) as forwards:
        read_beside(decoder, rows, cache, prompt, lengths)
    assert forwards == [len(rows.caches) + length for length in lengths]
    rows.check()
    check(cache.logits, one_pass_logits(model, prompt)[-1])
    # Its cache is an ordinary one: it joins the others, then goes on alone.
    rows.caches.append(cache)
    rows.tokens.append(prompt)
    rows.logits.append([])
    for _ in range(3):
        rows.step(decoder, None)
    rows.check()
    answer = model.decode(cache, WINDOW + 3)
    whole = [*prompt, *mx.argmax(answer, -1).tolist()]
    check(answer, one_pass_logits(model, whole)[len(prompt) - 1 : -1])


@pytest.mark.parametrize("model_type", SHARING)
def test_one_stream_is_enough_to_share(model_type):
    model = tiny_model(model_type)
    prompt = prompt_ids(30, seed=5)
    decoder, rows, cache = BatchDecoder(model), Rows(model, 1), model.new_cache()
    with counted_forwards(model) as forwards:
        read_beside(decoder, rows, cache, prompt, [20, 10])
    assert forwards == [21, 11]
    rows.check()
    check(cache.logits, one_pass_logits(model, prompt)[-1])


@pytest.mark.parametrize("model_type", SHARING)
def test_spans_of_both_kinds_take_turns(model_type):
    model = tiny_model(model_type)
    decoder, prompt = BatchDecoder(model), prompt_ids(60, seed=5)
    rows, cache = Rows(model, 3), model.new_cache()
    read_beside(decoder, rows, cache, prompt[:19], [19])
    model.prefill(cache, prompt[19:40])
    read_beside(decoder, rows, cache, prompt, [9, 11])
    rows.check()
    check(cache.logits, one_pass_logits(model, prompt)[-1])


@pytest.mark.parametrize("model_type", SHARING)
def test_state_copied_between_shared_spans_is_the_state_there(model_type):
    model = tiny_model(model_type)
    decoder, prompt = BatchDecoder(model), prompt_ids(50, seed=5)
    rows, cache = Rows(model, 2), model.new_cache()
    for start, end in ((0, 7), (7, 24), (24, 40)):
        rows.step(decoder, SharedSpan(cache, prompt[start:end], False))
        restored = restore_cache(
            model.new_cache().layers,
            end,
            [cache.buffer.copy(0, end)],
            take_snapshot(cache),
            room=WINDOW,
        )
        model.decode(restored, 0, token_ids=prompt[end : end + WINDOW])
        reference = one_pass_logits(model, prompt[: end + WINDOW])
        check(restored.logits, reference[-1])


@pytest.mark.parametrize("model_type", SHARING)
def test_what_the_bank_keeps_of_it_is_restored_exactly(model_type):
    """And a restored prompt can itself be read on in shared spans."""
    model = tiny_model(model_type)
    decoder, bank = BatchDecoder(model), SessionBank(model=model)
    prompt = prompt_ids(60, seed=5)
    rows = Rows(model, 3)
    prefill = PromptPrefill(
        model, Prompt(tuple(prompt), edges=(24,)), bank, arrival_s=0.0, tail_grid=8
    )
    for start, end in ((0, 17), (17, 24), (24, 56), (56, 60)):
        rows.step(decoder, SharedSpan(prefill.cache, prompt[start:end], end == 60))
        prefill.computed(end - start, 0.01)
    assert prefill.metrics().prefill_chunks == 4
    prefill.store(prompt)
    prefill.release()

    turn = [*prompt, *prompt_ids(12, seed=6)]
    warm = PromptPrefill(model, Prompt(tuple(turn)), bank, arrival_s=0.0)
    assert warm.cache.offset == 60
    read_beside(decoder, rows, warm.cache, turn, [1, 8, 3])
    warm.release()
    check(warm.cache.logits, one_pass_logits(model, turn)[-1])

    branch = [*prompt[:24], *prompt_ids(20, seed=7)]
    state = restore_or_prefill_prompt_state(token_ids=branch, session_bank=bank)
    assert state.cached_tokens == 24
    check(state.logits, one_pass_logits(model, branch)[-1])
    rows.check()
    bank.check()


@pytest.mark.parametrize("model_type", ALONE)
def test_where_spans_cannot_share_they_run_beside_it(model_type):
    model = tiny_model(model_type)
    decoder, lengths = BatchDecoder(model), PLANS["mixed"]
    assert not decoder.takes_spans
    prompt = prompt_ids(sum(lengths), seed=5)
    rows, cache = Rows(model, 2), model.new_cache()
    with counted_forwards(model) as forwards:
        read_beside(decoder, rows, cache, prompt, lengths)
    assert set(forwards) == {1}, "each row and each span has a forward of its own"
    rows.check()
    check(cache.logits, one_pass_logits(model, prompt)[-1])


# -- failures -------------------------------------------------------------------


def touchy(model_type: str) -> Model:
    """Return the tiny model of that type, which fails on ``POISON`` after it has written
    to its caches."""
    network = make_network(CONFIGS[model_type])
    kind = type(network)

    def call(self, inputs, cache=None):
        logits = kind.__call__(self, inputs, cache)
        if (inputs == POISON).any():
            raise RuntimeError("poison")
        return logits

    network.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    return Model(network, CONFIGS[model_type])


@pytest.mark.parametrize("is_tail", [False, True])
@pytest.mark.parametrize("model_type", [*SHARING, "qwen3_next", "mamba2"])
def test_a_span_that_raises_fails_alone(model_type, is_tail):
    plain, model = tiny_model(model_type), touchy(model_type)
    decoder = BatchDecoder(model)
    assert decoder.takes_spans == (model_type in SHARING)
    rows, cache = Rows(model, 3), model.new_cache()
    rows.step(decoder, SharedSpan(cache, (4, 5, 6), False))
    span = SharedSpan(cache, (7, POISON), is_tail)
    failures = decoder.decode(rows.caches, [8, 8, 8], span)
    assert list(failures) == [3]
    assert str(failures[3]) == "poison"
    for tokens, row, logits in zip(rows.tokens, rows.caches, rows.logits, strict=True):
        tokens.append(8)
        logits.append(row.logits)
    # The way of sharing is not to blame, and the next span shares again.
    assert decoder.takes_spans == (model_type in SHARING)
    assert decoder.fallback_reason is None
    prompt, cache = prompt_ids(20, seed=5), model.new_cache()
    assert POISON not in prompt
    read_beside(decoder, rows, cache, prompt, [12, 8])
    rows.model = plain
    rows.check()
    check(cache.logits, one_pass_logits(plain, prompt)[-1])


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "qwen3_next"])
def test_a_row_that_raises_leaves_the_span_and_the_others_alone(model_type):
    plain, model = tiny_model(model_type), touchy(model_type)
    decoder = BatchDecoder(model)
    rows, cache = Rows(model, 3), model.new_cache()
    prompt = prompt_ids(20, seed=5)
    span = SharedSpan(cache, prompt, True)
    assert list(decoder.decode(rows.caches, [8, POISON, 8], span)) == [1]
    check(cache.logits, one_pass_logits(plain, prompt)[-1])
    for row in (0, 2):
        reference = one_pass_logits(plain, [*rows.tokens[row], 8])[-1]
        check(rows.caches[row].logits, reference)


def test_where_only_sharing_fails_spans_are_read_alone_from_then_on():
    network = make_network(CONFIGS["llama"])

    class Lonely(type(network)):
        def __call__(self, inputs, cache=None):
            if inputs.shape[0] > 9:
                raise RuntimeError("too many rows")
            return super().__call__(inputs, cache)

    network.__class__ = Lonely
    model = Model(network, CONFIGS["llama"])
    decoder = BatchDecoder(model)
    assert decoder.takes_spans
    rows, cache = Rows(model, 2), model.new_cache()
    prompt = prompt_ids(25, seed=5)
    read_beside(decoder, rows, cache, prompt, [5, 12, 8])
    assert (decoder.mode, decoder.takes_spans) == ("rows", False)
    assert decoder.fallback_reason == "packed: too many rows"
    rows.check()
    check(cache.logits, one_pass_logits(tiny_model("llama"), prompt)[-1])
