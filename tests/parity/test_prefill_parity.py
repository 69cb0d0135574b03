"""Law 2: chunked = one pass = restored, for every kind of cache.

Each test also proves that what it means to compare took place: that the prompt was
split, that state was restored.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from mtplx.generation import PromptPrefill, restore_or_prefill_prompt_state
from mtplx.session import SessionBank
from mtplx.types import Prompt
from tests.tiny_models import (
    ANY_PREFIX,
    CONFIGS,
    VOCAB,
    WINDOW,
    one_pass_logits,
    prompt_ids,
    tiny_model,
)

TOLERANCE = 1e-4
LENGTH = 70
PROMPT = prompt_ids(LENGTH)

every_model = pytest.mark.parametrize("model_type", CONFIGS)


def difference(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    assert not mx.isnan(a).any()
    return float(mx.abs(a - b).max())


@every_model
@pytest.mark.parametrize("window", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, LENGTH])
def test_chunked_is_one_pass(model_type, window):
    model = tiny_model(model_type)
    length = 20 if window == 1 else LENGTH
    reference = one_pass_logits(model, PROMPT[:length])
    state = restore_or_prefill_prompt_state(
        token_ids=PROMPT[:length], model=model, window=window, tail_grid=8
    )
    assert len(state.plan.spans) >= length // window
    assert state.cache.offset == length
    assert difference(state.logits, reference[-1]) < TOLERANCE


@every_model
@pytest.mark.parametrize("cut", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, LENGTH - 1])
def test_restored_is_one_pass(model_type, cut):
    """A first prompt leaves state at ``cut``; the second, which goes on otherwise,
    resumes there."""
    model = tiny_model(model_type)
    bank = SessionBank(model=model)
    other = [(token + 1) % VOCAB for token in PROMPT]
    restore_or_prefill_prompt_state(
        token_ids=PROMPT, session_bank=bank, stable_prefix_len=cut
    )
    second = PROMPT[:cut] + other[cut:]
    state = restore_or_prefill_prompt_state(
        token_ids=second, session_bank=bank, stable_prefix_len=0
    )
    assert state.cached_tokens == cut
    assert state.metrics.new_prefill_tokens == LENGTH - cut
    assert difference(state.logits, one_pass_logits(model, second)[-1]) < TOLERANCE
    bank.check()


@every_model
def test_decoding_goes_on_as_one_pass_would(model_type):
    """Greedy tokens from a restored cache, one at a time, against one forward over the
    prompt and those tokens."""
    model = tiny_model(model_type)
    bank = SessionBank(model=model)
    restore_or_prefill_prompt_state(token_ids=PROMPT[:40], session_bank=bank)
    state = restore_or_prefill_prompt_state(token_ids=PROMPT[:50], session_bank=bank)
    assert state.cached_tokens == 40
    logits = model.decode(state.cache, max_new_tokens=2 * WINDOW)
    tokens = mx.argmax(logits, axis=-1).tolist()
    reference = one_pass_logits(model, PROMPT[:50] + tokens)
    assert difference(logits, reference[49:-1]) < TOLERANCE


@every_model
def test_two_requests_that_share_a_prefix_do_not_touch_each_other(model_type):
    """Run interleaved from one stored prefix, each gives what it gives alone."""
    model = tiny_model(model_type)
    bank = SessionBank(model=model)
    restore_or_prefill_prompt_state(
        token_ids=PROMPT[:40], session_bank=bank, stable_prefix_len=30
    )
    prompts = [PROMPT[:30] + prompt_ids(12, seed=seed) for seed in (2, 3)]
    states = [
        restore_or_prefill_prompt_state(token_ids=prompt, session_bank=bank)
        for prompt in prompts
    ]
    assert [state.cached_tokens for state in states] == [30, 30]
    tokens: list[list[int]] = [[], []]
    for _ in range(WINDOW + 4):
        for mine, state in zip(tokens, states, strict=True):
            mine.append(int(model.decode(state.cache).argmax()))
    for prompt, mine in zip(prompts, tokens, strict=True):
        cold = restore_or_prefill_prompt_state(token_ids=prompt, model=model)
        alone = model.decode(cold.cache, max_new_tokens=WINDOW + 4)
        assert mx.argmax(alone, axis=-1).tolist() == mine
    # And what they did has not reached the bank.
    again = restore_or_prefill_prompt_state(token_ids=prompts[0], session_bank=bank)
    assert again.cached_tokens == len(prompts[0]) - 1 or model_type not in ANY_PREFIX
    reference = one_pass_logits(model, prompts[0])[-1]
    assert difference(again.logits, reference) < TOLERANCE


@every_model
def test_a_repeated_prompt_computes_only_what_it_must(model_type):
    """A whole-prompt hit, off by one, is where other servers go wrong."""
    model = tiny_model(model_type)
    bank = SessionBank(model=model)
    first = restore_or_prefill_prompt_state(
        token_ids=PROMPT, session_bank=bank, tail_grid=8
    )
    again = restore_or_prefill_prompt_state(
        token_ids=PROMPT, session_bank=bank, tail_grid=8
    )
    at_most = 1 if model_type in ANY_PREFIX else 8
    assert 1 <= again.metrics.new_prefill_tokens <= at_most
    assert difference(again.logits, first.logits) < TOLERANCE


@every_model
def test_state_kept_while_decoding_is_the_state_of_those_tokens(model_type):
    """The end of a turn, stored from a cache that has decoded, resumes exactly."""
    model = tiny_model(model_type)
    bank = SessionBank(model=model)
    prefill = PromptPrefill(model, Prompt(tuple(PROMPT[:30])), bank, arrival_s=0.0)
    prefill.run()
    answer = mx.argmax(model.decode(prefill.cache, WINDOW + 5), axis=-1).tolist()
    prefill.store((*PROMPT[:30], *answer))
    prefill.release()
    turn = PROMPT[:30] + answer[:-1] + prompt_ids(10, seed=5)
    state = restore_or_prefill_prompt_state(token_ids=turn, session_bank=bank)
    assert state.cached_tokens == 30 + len(answer) - 1
    assert difference(state.logits, one_pass_logits(model, turn)[-1]) < TOLERANCE
