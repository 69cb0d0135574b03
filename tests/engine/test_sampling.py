"""Each setting changes what it says, and only that."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import pytest

from mtplx.engine.sampling import NOT_A_NUMBER, Draw, Sampler, draw_tokens
from mtplx.types import SamplingParams

# Probabilities 0.5, 0.25, 0.15, 0.1
LOGITS = mx.log(mx.array([0.5, 0.25, 0.15, 0.1]))


def drawn(logits=LOGITS, *, prompt=(), generated=(), allowed=None, draws=400, **settings):
    """Return how often each token is drawn."""
    sampler = Sampler(SamplingParams(seed=1, **settings), prompt)
    mask = None if allowed is None else mx.array([token in allowed for token in range(4)])
    draw = Draw(sampler, generated, mask)
    return Counter(draw_tokens(logits[None], [draw]).item() for _ in range(draws))


def test_temperature_0_takes_the_most_likely():
    assert set(drawn(temperature=0)) == {0}


def test_temperature_1_draws_from_the_distribution():
    counts = drawn(draws=2000)
    for token, share in enumerate((0.5, 0.25, 0.15, 0.1)):
        assert abs(counts[token] / 2000 - share) < 0.05


def test_a_low_temperature_sharpens():
    assert drawn(temperature=0.2)[0] > 350


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.4}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.4}, {0, 1}),
    ],
)
def test_filters_leave_what_they_say(settings, left):
    assert set(drawn(**settings)) == left


def test_temperature_comes_before_the_filters():
    """At temperature 3 the four are so alike that top_p 0.7 keeps three."""
    assert set(drawn(temperature=3.0, top_p=0.7)) == {0, 1, 2}


def test_presence_is_subtracted_once_and_frequency_each_time():
    level = mx.zeros(4)
    assert set(drawn(level, generated=[0, 0, 0], temperature=0, presence_penalty=1)) == {1}
    # Each lowers the twice-used token 1 below the once-used 0, or not.
    tilted = mx.array([0.0, 0.1, -9.0, -9.0])
    seen = [0, 1, 1]
    assert set(drawn(tilted, generated=seen, temperature=0, presence_penalty=1)) == {1}
    assert set(drawn(tilted, generated=seen, temperature=0, frequency_penalty=1)) == {0}


def test_penalties_look_at_the_whole_answer():
    answer = [0, *[3] * 50]
    logits = mx.array([0.5, 0.0, -9.0, -9.0])
    assert set(drawn(logits, generated=answer, temperature=0, presence_penalty=1)) == {1}


def test_presence_and_frequency_do_not_count_the_prompt_and_repetition_does():
    logits = mx.array([1.0, 0.9, 0.0, 0.0])
    for settings in ({"presence_penalty": 1.0}, {"frequency_penalty": 1.0}):
        assert set(drawn(logits, prompt=[0], temperature=0, **settings)) == {0}
    assert set(drawn(logits, prompt=[0], temperature=0, repetition_penalty=1.5)) == {1}


def test_a_bias_forbids_or_forces():
    assert set(drawn(logit_bias=((0, -100.0), (1, -100.0)))) == {2, 3}
    assert set(drawn(logit_bias=((3, 100.0),))) == {3}
    assert set(drawn(temperature=0, logit_bias=((3, 100.0),))) == {3}


def test_a_bias_multiplies_the_odds():
    """Twice as likely as before, against the others: 0.2 of 1.1."""
    counts = drawn(draws=800, logit_bias=((3, math.log(2)),))
    assert abs(counts[3] / 800 - 0.2 / 1.1) < 0.05


def test_a_bias_comes_before_penalties_and_temperature():
    logits = mx.array([0.0, 3.0, -9.0, -9.0])
    # Biased to 4 and halved, token 0 is below 3; 4 added to a halved 0 would be above.
    halved = {"repetition_penalty": 2.0, "temperature": 0}
    assert set(drawn(logits, prompt=[0], logit_bias=((0, 4.0),), **halved)) == {1}
    # Equal after the bias, so equally likely at any temperature.
    counts = drawn(logits, draws=400, temperature=0.1, logit_bias=((0, 3.0),))
    assert abs(counts[0] / 400 - 0.5) < 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0},
        {"top_k": 1},
        {"top_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 1, "top_p": 0.1, "min_p": 0.5},
    ],
)
def test_filters_see_what_is_allowed_only(settings):
    """Alone, each of these filters keeps nothing but token 0."""
    assert set(drawn(allowed={2}, draws=50, **settings)) == {2}
    assert set(drawn(allowed={2, 3}, draws=50, **settings)) <= {2, 3}


def test_neither_bias_nor_penalty_brings_back_what_is_forbidden():
    pushed = {"logit_bias": ((0, 100.0),), "presence_penalty": -100.0}
    assert set(drawn(generated=[0], allowed={1, 3}, **pushed)) == {1, 3}


def test_the_logits_stay_as_they_were():
    logits = mx.array([1.0, 0.9, 0.0, 0.0])
    more = {"logit_bias": ((2, 5.0),), "allowed": {2, 3}}
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 1.0}
    drawn(logits, prompt=[0], generated=[1], **penalties, **more)
    assert logits.tolist() == pytest.approx([1.0, 0.9, 0.0, 0.0])


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 + 5, -1])
def test_any_whole_number_is_a_seed(seed):
    sampler = Sampler(SamplingParams(seed=seed))
    assert draw_tokens(LOGITS[None], [Draw(sampler)]).item() in range(4)


def test_logits_that_are_not_numbers_give_no_token():
    for settings in (SamplingParams(), SamplingParams(temperature=0)):
        logits = mx.array([[0.0, mx.nan], [0.0, -mx.inf]])
        drawn = draw_tokens(logits, [Draw(Sampler(settings)) for _ in range(2)])
        assert drawn.tolist() == [NOT_A_NUMBER, 0]


SETTINGS = [
    {"temperature": 0},
    {},
    {"temperature": 0, "logit_bias": ((3, 100.0),)},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "presence_penalty": 1.0},
    {"min_p": 0.1, "repetition_penalty": 1.3},
]


def test_rows_draw_together_what_they_draw_alone():
    """Whatever the settings of the others, and wherever they stand."""
    logits = mx.random.normal((12, 50), key=mx.random.key(3))
    wanted = [SETTINGS[row % len(SETTINGS)] for row in range(12)]

    def draw(row, sampler, allowed=None):
        mask = mx.arange(50) % 2 == 0 if row == 7 else None
        return Draw(sampler, [row, row, 2], mask)

    def samplers():
        return [
            Sampler(SamplingParams(seed=row, **more), [row, 4])
            for row, more in enumerate(wanted)
        ]

    together, alone = samplers(), samplers()
    for _ in range(5):
        found = draw_tokens(logits, [draw(*pair) for pair in enumerate(together)])
        for row, sampler in enumerate(alone):
            one = draw_tokens(logits[row : row + 1], [draw(row, sampler)])
            assert found[row].item() == one.item()
