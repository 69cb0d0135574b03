"""What those who watch an engine are told."""

from __future__ import annotations

import pytest

from mtplx.engine.live import LiveRecorder
from mtplx.errors import EngineUnavailableError
from mtplx.scheduler.step import PrefillSpan, Step, StepResult, Why
from tests.engine.harness import PROMPT, run


def step(*decoding, spans=()):
    return Step(decoding, 10, tuple(spans), Why.ALL_SCHEDULED, 0.1, 0.02)


def tell(recorder, step, result, *, begin_s, model="m"):
    recorder.iterated(model, 1, step, result, begin_s=begin_s, took_s=1.0)


@pytest.fixture
def told():
    return []


@pytest.fixture
def recorder(told):
    recorder = LiveRecorder()
    recorder.attach(told.append)
    return recorder


def test_gaps_run_from_token_to_token(recorder, told):
    tail = PrefillSpan("b", 0, 9, is_tail=True)
    tell(recorder, step("a"), StepResult(decode_s=0.5), begin_s=10)
    tell(recorder, step("a", spans=[tail]), StepResult(0.25, (2.0,)), begin_s=11)
    tell(recorder, step("a", "b"), StepResult(decode_s=0.5), begin_s=14)
    assert [each.gaps_s for each in told] == [(None,), (0.75,), (3.25, 1.25)]


def test_a_stream_that_pauses_begins_anew(recorder, told):
    for names in (("a", "b"), ("b",), ("a", "b")):
        tell(recorder, step(*names), StepResult(decode_s=0.5), begin_s=10 * len(told))
    assert told[-1].gaps_s == (None, 10.0)


def test_tokens_under_way_come_with_the_next_step(recorder, told):
    for begin_s, decode_s, under_way in (
        (10, 0.5, False),
        (11, None, True),
        (12, 0.5, True),
        (13, 0.75, True),
        (14, 0.75, False),
        (15, 0.75, False),
    ):
        result = StepResult(decode_s, under_way=under_way)
        tell(recorder, step("a"), result, begin_s=begin_s)
    assert [each.gaps_s[0] for each in told] == [None, None, 2.0, 1.25, 0.5, 1.0]


def test_models_that_take_turns_do_not_mix(recorder, told):
    for model in ("m", "n", "m"):
        result = StepResult(decode_s=0.5)
        tell(recorder, step("a"), result, begin_s=len(told), model=model)
    assert [each.gaps_s for each in told] == [(None,), (None,), (2.0,)]


def test_what_was_not_computed_has_no_time(recorder, told):
    spans = [PrefillSpan("a", 0, 4, False), PrefillSpan("b", 0, 4, True)]
    tell(recorder, step(spans=spans), StepResult(span_s=(0.5,)), begin_s=0)
    assert [span.seconds for span in told[0].spans] == [0.5, None]
    tell(recorder, step("b"), StepResult(decode_s=0.5), begin_s=2)
    assert told[1].gaps_s == (None,)


def test_nobody_is_told_after_the_last_one_left(recorder, told):
    sink = told.append
    recorder.detach(print)
    assert recorder.watched
    recorder.detach(sink)
    assert not recorder.watched


def test_an_engine_tells_all_that_it_computes(start):
    engine = start(prefill_window=16)
    told = []
    sink = told.append
    engine.watch(sink)
    _, end = run(engine, PROMPT, tokens=5)
    engine.unwatch(sink)
    run(engine, PROMPT[::-1], tokens=5, request_id="unseen")

    # The end goes out before the iteration is over; the next command comes after it.
    spans = [span for each in told for span in each.spans]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert (spans[-1].end, spans[-1].is_tail) == (len(PROMPT), True)
    # An overlapped step may have begun before the last token was read.
    extra = sum(len(each.decoding) for each in told) - (end.completion_tokens - 1)
    assert extra in (0, 1)
    gaps_s = [gap for each in told for gap in each.gaps_s if gap is not None]
    assert len(gaps_s) >= end.completion_tokens - 2
    assert max(gaps_s) == pytest.approx(end.stream.itl_worst_s, rel=0.2, abs=0.01)
    assert [each.number for each in told] == [*range(1, len(told) + 1)]


def test_the_bank_can_be_looked_at(start):
    engine = start()
    assert engine.view().result().nodes == ()
    _, end = run(engine, PROMPT, tokens=5)
    first, *others = nodes = engine.view().result().nodes
    assert first.first_tokens == tuple(PROMPT[:8])
    assert [node.parent for node in nodes] == [None, *range(len(others))]
    assert nodes[-1].end == len(PROMPT) + end.completion_tokens - 1


def test_a_stopped_engine_can_not_be_watched(start):
    engine = start()
    engine.stop()
    engine.unwatch(print)
    with pytest.raises(EngineUnavailableError):
        engine.watch(print)
