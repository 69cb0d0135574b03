"""The self-test finds nothing wrong with sound models, and what is wrong with others."""

from __future__ import annotations

import json
import math
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import pytest

from mtplx.errors import GenerationError, InvalidRequestError
from mtplx.models import Model
from mtplx.types import TokenLogprob
from mtplx.verify import LEAST_TOKENS, Flip, verify
from mtplx.verify.prompt import make_prompt
from mtplx.verify.reference import Reference, Tally
from tests.text.tokenizers_factory import make_wrapper
from tests.tiny_models import ANY_PREFIX, CONFIGS, make_network, tiny_model

NAMES = (
    "cold",
    "chunked",
    "batched, together",
    "batched, apart",
    "shared span",
    "warm",
    "memory, borrowed",
    "memory, copied",
    "disk",
    "engine",
    "engine, overlapped",
)
SHARE_SPANS = ("llama", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss")
RESTORED = LEAST_TOKENS * 2 // 3


@cache
def wrapper():
    return make_wrapper()


def with_text(model_type, kind=lambda network: network) -> Model:
    config = {**CONFIGS[model_type], "vocab_size": len(wrapper())}
    return Model(kind(make_network(config)), config, wrapper(), name=model_type)


def run(model, **changes):
    arguments = {"tokens": LEAST_TOKENS, "new_tokens": 4, **changes}
    checks = verify(model, **arguments)
    return {check.name: check for check in checks}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_kind_of_cache_passes(model_type):
    begun = []
    checks = run(with_text(model_type), on_start=begun.append)
    assert tuple(begun) == tuple(checks) == NAMES
    for check in checks.values():
        assert check.passed, check
        json.dumps(dict(check.reach))
        if check.verdict != "not possible":
            assert check.max_difference < 1e-3
            assert check.relative_error < 1e-4
    not_possible = [n for n, check in checks.items() if check.verdict == "not possible"]
    assert not_possible == ([] if model_type in SHARE_SPANS else ["shared span"])
    assert checks["chunked"].reach["spans"] > 4
    assert checks["batched, together"].reach["rows"] == 3
    least = LEAST_TOKENS - (1 if model_type in ANY_PREFIX else 32)
    assert checks["warm"].reach["restored tokens"] == least
    for name in ("memory, borrowed", "memory, copied", "disk"):
        assert checks[name].reach["restored tokens"] == RESTORED
    assert checks["memory, copied"].compared_steps == 2 * checks["cold"].compared_steps
    assert checks["disk"].reach["bytes read"] > 0
    assert checks["engine"].reach["restored tokens"] > 0
    assert checks["engine"].reach["restored by the next turn"] >= RESTORED
    assert checks["engine"].reach["overlapped steps"] == 0
    assert checks["engine, overlapped"].reach["overlapped steps"] > 0


class Faulty(nn.Module):
    """A network with a fault that no trial at load can find: it begins later."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    @property
    def layers(self):
        return self.network.layers

    @property
    def make_cache(self):
        return self.network.make_cache


class WrongInLaterSpans(Faulty):
    def __call__(self, inputs, cache=None):
        later = cache is not None and cache[0].offset > 12 and inputs.shape[1] > 1
        logits = self.network(inputs, cache=cache)
        return logits[..., ::-1] if later else logits


class RaisesInLaterSpans(Faulty):
    def __call__(self, inputs, cache=None):
        if cache is not None and cache[0].offset > 12 and inputs.shape[1] > 1:
            raise RuntimeError("no room for this tensor")
        return self.network(inputs, cache=cache)


class NotANumberInLaterSpans(Faulty):
    def __call__(self, inputs, cache=None):
        later = cache is not None and cache[0].offset > 12 and inputs.shape[1] > 1
        return self.network(inputs, cache=cache) * (mx.nan if later else 1)


class LooksAtNothingBefore(Faulty):
    """Every part is read as if it were a prompt of its own."""

    def __call__(self, inputs, cache=None):
        return self.network(inputs)


IN_SPANS = ("chunked", "memory, borrowed", "memory, copied", "disk")


@pytest.mark.parametrize(
    ("kind", "verdict", "note"),
    [
        (WrongInLaterSpans, "different", "off by more than rounding"),
        (NotANumberInLaterSpans, "different", "not numbers"),
        (RaisesInLaterSpans, "failed", "RuntimeError: no room for this tensor"),
    ],
)
def test_a_fault_is_found_in_every_way_that_meets_it(kind, verdict, note):
    checks = run(with_text("llama", kind))
    assert checks["cold"].verdict == "same"
    for name in IN_SPANS:
        assert checks[name].verdict == verdict
        assert note in checks[name].note
        assert not checks[name].passed
    numbers = verdict == "different" and kind is not NotANumberInLaterSpans
    assert (checks["chunked"].max_difference is not None) == numbers


def test_a_model_that_must_be_read_whole_says_so_and_is_served_all_the_same():
    checks = run(with_text("llama", LooksAtNothingBefore))
    assert tuple(checks) == NAMES
    for name in NAMES[1:-2]:
        assert checks[name].verdict == "not possible"
        assert "must be read whole: in two parts" in checks[name].note
    assert "must be read whole" in checks["cold"].note
    assert checks["engine"].verdict == "same"
    assert checks["engine"].reach["restored tokens"] == 0
    assert all(check.passed for check in checks.values())


def test_without_a_tokenizer_all_but_the_engine_is_checked():
    checks = run(tiny_model("llama"))
    verdicts = {name: check.verdict for name, check in checks.items()}
    engines = dict.fromkeys(NAMES[-2:], "not possible")
    assert verdicts == {**dict.fromkeys(NAMES, "same"), **engines}
    assert "tokenizer" in checks["engine"].note


class Fails(Faulty):
    def __call__(self, inputs, cache=None):
        if cache is not None:
            raise RuntimeError("no kernel for this dtype")
        return self.network(inputs)


def test_a_model_that_cannot_read_at_all_has_no_certificate():
    with pytest.raises(GenerationError, match=r"no kernel for this dtype\. Try another"):
        run(with_text("llama", Fails))


@pytest.mark.parametrize(
    "lengths", [{"tokens": LEAST_TOKENS - 1}, {"new_tokens": 1}, {"tokens": 1022}]
)
def test_lengths_that_do_not_fit_are_refused(lengths):
    with pytest.raises(InvalidRequestError, match=r"new ones"):
        run(tiny_model("llama"), **lengths)


@pytest.mark.parametrize("model", [with_text("llama"), tiny_model("llama")])
def test_the_prompt_is_as_long_as_asked_and_follows_from_its_seed(model):
    prompts = [make_prompt(model, 150, seed) for seed in (0, 0, 1)]
    assert {len(prompt) for prompt in prompts} == {150}
    assert prompts[0] == prompts[1] != prompts[2]
    assert all(0 <= token < model.vocab_size for token in prompts[2])


# -- the tally ------------------------------------------------------------------

ROW = [1.0, 8.0, 7.999, -3.0]


def tally_of(*rows, dtype="float32"):
    """Compare rows with a reference that says ``ROW`` after each token of the answer."""
    reference = Reference((5, 6), (1,) * len(rows), mx.array([ROW] * len(rows)), dtype)
    tally = Tally(reference)
    for step, row in enumerate(rows):
        tally.add(1 + step, mx.array(row))
    return tally.check("some way", {"spans": 2}, 0.5)


def test_equal_rows_are_the_same():
    check = tally_of(ROW, ROW)
    assert (check.verdict, check.max_difference, check.flips) == ("same", 0.0, ())
    assert (check.compared_steps, check.reach, check.seconds) == (2, {"spans": 2}, 0.5)


def test_a_near_tie_is_told_and_passes():
    check = tally_of(ROW, [1.0, 7.9985, 8.0005, -3.0])
    assert check.verdict == "near tie"
    assert check.passed
    assert check.flips == (Flip(2, 1, 2, pytest.approx(0.001, abs=1e-6)),)
    assert check.max_difference == pytest.approx(0.0015, abs=1e-6)


def test_another_token_that_was_no_near_tie_fails():
    # Both moved by less than the margin between them.
    check = tally_of([1.0, 7.9994, 7.9996, -3.0])
    assert check.verdict == "different"
    assert check.max_difference < check.flips[0].margin


def test_more_than_rounding_fails_though_the_tokens_are_the_same():
    row = [1.0, 8.0, 6.0, -3.0]
    assert tally_of(ROW, row).verdict == "different"
    assert tally_of(ROW, [1.0, 8.0, 7.9, -3.0], dtype="bfloat16").verdict == "same"


@pytest.mark.parametrize("rows", [(ROW, [math.nan] * 4), ([math.nan] * 4, ROW)])
def test_what_is_not_a_number_fails_wherever_it_comes(rows):
    check = tally_of(*rows)
    assert (check.verdict, check.max_difference) == ("different", None)
    json.dumps(check.relative_error, allow_nan=False)


def test_nothing_compared_is_nothing_proved():
    assert tally_of().verdict == "failed"


def test_generated_tokens_are_compared_by_their_log_probabilities():
    reference = Reference((5, 6), (1, 1), mx.array([ROW] * 2), "float32")
    logprobs = (mx.array(ROW) - mx.logsumexp(mx.array(ROW))).tolist()
    tally = Tally(reference)
    top = ((1, logprobs[1]), (2, logprobs[2]))
    tally.add_chosen(1, TokenLogprob(1, logprobs[1], top))
    check = tally.check("engine", {}, 0.0)
    assert check.verdict == "same"
    assert check.max_difference < 1e-6
    tally.add_chosen(2, TokenLogprob(3, logprobs[3], top))
    check = tally.check("engine", {}, 0.0)
    assert check.verdict == "different"
    assert [flip.token for flip in check.flips] == [3]
