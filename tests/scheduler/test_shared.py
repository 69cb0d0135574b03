"""A span in the forward of a decode: which one, what it costs, who waited for it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import CostModel, StepCost
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import Outcome, Step, StepResult
from tests.scheduler.engine_fake import EngineFake

SHARING = {"spans_share_decodes": True}
TOKENS_ONLY = {"relative_itl_target": None}

COST = StepCost(
    decode_s=0.06,
    decode_row_s=0.01,
    span_s=0.06,
    span_token_s=0.005,
    shared_token_s=0.005,
)
"""A span of its own reads the weights once more; a shared one costs its tokens."""

TARGET_S = 0.2


def streaming(names="a", **options) -> EngineFake:
    """Return an engine in which each of ``names`` decodes."""
    engine = EngineFake(**options)
    for name in names:
        engine.add(name, 10)
    for name in names:
        engine.run_until_decoding(name)
    engine.steps.clear()
    return engine


def lengths(engine: EngineFake, request_id: str) -> list[int]:
    return [end - start for start, end in engine.spans(request_id)]


# -- which span -----------------------------------------------------------------


def test_the_first_span_of_a_step_with_streams_is_shared_and_no_other():
    engine = streaming("ab", **SHARING, **TOKENS_ONLY, prefill_window=40)
    engine.add("long", 100)
    engine.add("short", 30)
    step = engine.run()
    assert step.decoding == ("a", "b")
    assert [(s.request_id, s.tokens) for s in step.spans] == [
        ("short", 30),
        ("long", 40),
        ("long", 40),
        ("long", 20),
    ]
    assert [span.shared for span in step.spans] == [True, False, False, False]


def test_without_streams_no_span_is_shared():
    engine = EngineFake(**SHARING, **TOKENS_ONLY, prefill_window=40)
    engine.add("a", 30)
    engine.add("b", 100)
    step = engine.run()
    assert [span.tokens for span in step.spans] == [30, 40, 40, 20]
    assert not any(span.shared for span in step.spans), "nor beside one that is born here"


def test_where_the_model_cannot_share_no_span_is_shared():
    engine = streaming(**TOKENS_ONLY)
    engine.add("long", 100)
    assert [span.shared for span in engine.run().spans] == [False]


def test_a_piece_that_must_not_be_split_is_shared_whole():
    engine = streaming(**SHARING, **TOKENS_ONLY, prefill_window=32)
    engine.add("image", 200, atomic=[(0, 150)])
    (span,) = engine.run().spans
    assert (span.start, span.end, span.shared) == (0, 150, True)


def test_a_shared_tail_makes_its_request_a_stream():
    engine = streaming(**SHARING, **TOKENS_ONLY)
    engine.add("b", 20)
    (span,) = engine.run().spans
    assert span.shared
    assert span.is_tail
    assert engine.run().decoding == ("a", "b")


# -- what it costs --------------------------------------------------------------


def teach(cost: StepCost, *, noise=0.0) -> CostModel:
    model = CostModel()
    for number in range(300):
        tokens, start = 16 + 37 * number % 200, 91 * number % 4000
        rows, depth = 1 + number % 8, 53 * number % 3000
        factor = 1 + noise * (number % 3 - 1)
        model.observe_span(start, tokens, cost.of_span(start, tokens) * factor)
        decode_s = cost.of_decode(rows, depth)
        model.observe_decode(rows, depth, decode_s * factor)
        both_s = decode_s + cost.of_span(start, tokens, shared=True)
        model.observe_decode(rows, depth, both_s * factor, shared=(start, tokens))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_two_kinds_are_learned_apart(noise):
    learned = teach(COST, noise=noise).cost
    for tokens in (16, 64, 200):
        for shared in (False, True):
            wanted = COST.of_span(500, tokens, shared=shared)
            found = learned.of_span(500, tokens, shared=shared)
            assert found == pytest.approx(wanted, rel=0.1 + noise)
    assert learned.of_decode(4, 500) == pytest.approx(COST.of_decode(4, 500), rel=0.2)


def test_spans_of_their_own_say_nothing_about_shared_ones():
    model = teach(COST)
    before = model.cost
    for _ in range(50):
        model.observe_span(0, 100, 7.0)
    assert model.cost.of_span(0, 100) == pytest.approx(7.0, rel=0.05)
    assert model.cost.of_span(0, 100, shared=True) == before.of_span(0, 100, shared=True)
    assert model.cost.of_decode(4, 100) == before.of_decode(4, 100)


def test_more_of_a_shared_span_fits_into_the_same_time():
    model = teach(COST)
    alone = model.span_within(0.1, 0, 1000)
    shared = model.span_within(0.1, 0, 1000, shared=True)
    assert alone == pytest.approx(8, abs=1)
    assert shared == pytest.approx(20, abs=1)


def read_beside_streams(**options) -> EngineFake:
    """Let the cost be learned, then read a long prompt beside three streams."""
    engine = streaming("abc", cost=COST, target_itl_s=TARGET_S, **options)
    for number in range(12):
        name = f"warm {number}"
        engine.add(name, 40 + 9 * number)
        engine.run_until_decoding(name)
        ended = engine.scheduler.end(name, Outcome.FINISHED)
        assert ended is not None
    engine.steps.clear()
    engine.add("long", 900)
    engine.run_until_decoding("long")
    return engine


def test_for_the_same_target_sharing_reads_longer_spans_and_is_done_earlier():
    alone, shared = read_beside_streams(), read_beside_streams(**SHARING)
    assert all(step.spans[0].shared for step in shared.steps)
    assert all(len(step.spans) == 1 for step in shared.steps)
    assert not any(span.shared for step in alone.steps for span in step.spans)
    # 0.2 s leave 0.11 s beside the decode: 10 tokens, or 22; less the margin.
    assert max(lengths(alone, "long")) == 16, "its guaranteed share, beyond the target"
    assert min(lengths(shared, "long")[:-1]) >= 18
    assert max(lengths(shared, "long")) <= 22
    assert len(shared.steps) < len(alone.steps)


def test_a_shared_step_keeps_the_target():
    for step in read_beside_streams(**SHARING).steps:
        (span,) = step.spans
        rows, depth = len(step.decoding), step.decode_depth_tokens
        took_s = COST.of_span(span.start, span.tokens, shared=True)
        assert took_s + COST.of_decode(rows, depth) <= TARGET_S
        assert step.target_s == TARGET_S
        assert step.predicted_s == pytest.approx(
            took_s + COST.of_decode(rows, depth), rel=0.1
        )


# -- who waited -----------------------------------------------------------------


def decided(costs: CostModel) -> tuple[Scheduler, Step]:
    """Return a step with a stream and, sharing its forward, a span of 100 tokens."""
    config = SchedulerConfig(**SHARING, **TOKENS_ONLY)
    scheduler = Scheduler(config, costs)
    scheduler.add("stream", prompt_tokens=1000)
    scheduler.start("stream")
    first = scheduler.schedule()
    scheduler.apply(first, StepResult(span_s=tuple(1.0 for _ in first.spans)))
    scheduler.add("prompt", prompt_tokens=100)
    scheduler.start("prompt")
    step = scheduler.schedule()
    assert step.decoding == ("stream",)
    assert [span.shared for span in step.spans] == [True]
    return scheduler, step


def test_a_shared_forward_is_divided_as_it_was_expected_to_be():
    """0.07 s for the decode and 0.5 s for the span; it took twice as long."""
    scheduler, step = decided(CostModel(COST))
    assert scheduler.costs.cost.of_decode(1, 1000) == pytest.approx(0.07)
    scheduler.apply(step, StepResult(decode_s=1.14, span_s=(0.0,)))
    assert scheduler.stall("stream").suffered_s == pytest.approx(1.0)
    assert scheduler.stall("stream").caused_s == 0.0
    assert scheduler.stall("prompt").caused_s == pytest.approx(1.0)
    assert scheduler.stall("prompt").suffered_s == 0.0
    assert scheduler.state("prompt") == "decoding"


def test_a_forward_as_expected_changes_no_expectation():
    scheduler, step = decided(CostModel(COST))
    scheduler.apply(step, StepResult(decode_s=0.57, span_s=(0.0,)))
    cost = scheduler.costs.cost
    assert cost.of_decode(1, 1000) == pytest.approx(0.07)
    assert cost.of_span(0, 100, shared=True) == pytest.approx(0.5)


@pytest.mark.parametrize("decode_s", [0.01, 0.0701, 0.285])
def test_a_faster_forward_does_not_make_spans_free(decode_s):
    scheduler, step = decided(CostModel(COST))
    share = 0.5 / 0.57
    assert scheduler.shared_span_s(step, decode_s) == pytest.approx(decode_s * share)
    scheduler.apply(step, StepResult(decode_s=decode_s, span_s=(0.0,)))
    assert scheduler.stall("prompt").caused_s == pytest.approx(decode_s * share)
    learned_s = scheduler.costs.cost.of_span(0, 100, shared=True)
    assert 0.2 * decode_s < learned_s < 0.5


def test_a_shared_span_that_was_not_computed_costs_nobody_anything():
    scheduler, step = decided(CostModel(COST))
    before = scheduler.costs.cost
    ended = scheduler.apply(
        step, StepResult(decode_s=0.08, span_s=(None,), failed=frozenset(["prompt"]))
    )
    assert [(e.request_id, e.num_computed_tokens) for e in ended] == [("prompt", 0)]
    assert scheduler.stall("stream").suffered_s == 0.0
    assert scheduler.costs.cost == before, "nothing was measured"
    assert scheduler.schedule().decoding == ("stream",)


def test_a_span_after_the_shared_one_is_measured_as_before():
    engine = streaming(cost=COST, **SHARING, **TOKENS_ONLY)
    engine.add("short", 20)
    engine.add("long", 50)
    step = engine.run()
    assert [(s.request_id, s.shared) for s in step.spans] == [
        ("short", True),
        ("long", False),
    ]
    own_s = COST.of_span(0, 50)
    assert engine.scheduler.stall("long").caused_s == pytest.approx(own_s)
    assert engine.scheduler.stall("short").suffered_s == pytest.approx(own_s)
    shared_s = engine.scheduler.stall("short").caused_s
    assert engine.scheduler.stall("a").suffered_s == pytest.approx(own_s + shared_s)


# -- law 1 ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    noises=st.lists(st.floats(0.02, 20, allow_nan=False), min_size=1, max_size=12),
    prompts=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    target=st.sampled_from([None, 0.01, 0.2]),
)
def test_whatever_a_step_takes_each_token_is_computed_once(noises, prompts, target):
    """And the stall is never more than what the forwards took."""
    engine = streaming(
        "ab", **SHARING, target_itl_s=target, prefill_window=64, max_num_batched_tokens=96
    )
    exact = engine.cost
    for number, tokens in enumerate(prompts):
        factor = noises[number % len(noises)]
        engine.cost = StepCost(
            decode_s=exact.decode_s * factor,
            span_token_s=exact.span_token_s,
            shared_token_s=exact.shared_token_s * factor,
        )
        name = f"r{number}"
        engine.add(name, tokens)
        engine.run_until_decoding(name)
        assert engine.computed[name] == list(range(tokens))
        spans = [span for step in engine.steps for span in step.spans]
        assert all(
            span.shared == (step.spans[0] is span)
            for step in engine.steps
            for span in step.spans
        )
        assert sum(span.tokens for span in spans if span.request_id == name) == tokens
        most_s = 20 * (len(engine.steps) * exact.decode_s + tokens * exact.span_token_s)
        assert 0 <= engine.scheduler.stall(name).caused_s <= most_s
