import pytest

from mtplx.errors import InvalidRequestError, QueueFullError
from mtplx.scheduler.step import Outcome, StepResult, Why
from tests.scheduler.engine_fake import EngineFake

TOKENS_ONLY = {"relative_itl_target": None}


def test_a_prompt_is_computed_once_in_spans_and_then_decodes():
    engine = EngineFake(prefill_window=100, max_num_batched_tokens=100, max_num_seqs=4)
    engine.add("a", 250)
    assert engine.run_until_decoding("a") == 3
    assert engine.computed["a"] == list(range(250))
    assert [s.spans[-1].is_tail for s in engine.steps] == [False, False, True]
    assert engine.run().decoding == ("a",)


def test_every_stream_decodes_in_every_iteration_beside_prefill():
    engine = EngineFake(**TOKENS_ONLY, prefill_window=64, max_num_batched_tokens=64)
    for name in "abc":
        engine.add(name, 10)
    for name in "abc":
        engine.run_until_decoding(name)
    engine.add("long", 1000)
    while engine.scheduler.state("long") != "decoding":
        step = engine.run()
        assert step.decoding == ("a", "b", "c")
        assert step.tokens <= 64
    assert max(end - start for start, end in engine.spans("long")) == 60


def test_spans_end_at_edges_and_keep_atomic_ranges_whole():
    engine = EngineFake(**TOKENS_ONLY, prefill_window=32, max_num_batched_tokens=64)
    engine.add("a", 120, edges=[7, 90], atomic=[(20, 45), (60, 66)])
    engine.run_until_decoding("a")
    ends = {end for _, end in engine.spans("a")}
    assert {7, 90, 120} <= ends
    assert not any(20 < end < 45 or 60 < end < 66 for end in ends)


def test_an_atomic_range_beyond_window_and_budget_runs_whole_and_alone():
    engine = EngineFake(**TOKENS_ONLY, prefill_window=32, max_num_batched_tokens=64)
    engine.add("a", 300, atomic=[(10, 210)])
    engine.run_until_decoding("a")
    step = next(s for s in engine.steps if s.why is Why.WHOLE_PIECE)
    assert [(s.start, s.end) for s in step.spans] == [(10, 210)]
    assert engine.computed["a"] == list(range(300))


def test_restored_tokens_are_not_computed():
    engine = EngineFake()
    engine.add("a", 50, cached=40)
    engine.run_until_decoding("a")
    assert engine.computed["a"] == list(range(40, 50))


def test_fewest_uncached_tokens_go_first():
    engine = EngineFake(prefill_window=64, max_num_batched_tokens=64)
    engine.add("long", 600)
    engine.run()
    engine.add("half cached", 300, cached=250)
    engine.add("short", 40)
    engine.run()
    assert [s.request_id for s in engine.steps[-1].spans][:1] == ["short"]
    engine.run_until_decoding("half cached")
    assert engine.scheduler.state("long") == "prefilling"


def test_a_long_prompt_takes_no_place_before_its_turn():
    engine = EngineFake(max_num_batched_tokens=100, max_num_partial_prefills=2)
    engine.add("first", 1000)
    engine.run()
    engine.add("second", 1000)
    assert engine.scheduler.next_to_start() is None
    engine.add("short", 40)
    assert engine.scheduler.next_to_start() == "short"


def test_a_better_estimate_changes_the_order():
    engine = EngineFake(max_num_seqs=1)
    engine.add("a", 100)
    engine.add("b", 110)
    assert engine.scheduler.next_to_start() == "a"
    engine.scheduler.expect_cached("b", 90)
    assert engine.scheduler.next_to_start() == "b"
    engine.scheduler.check()


def test_an_aged_prompt_is_not_overtaken_any_more():
    engine = EngineFake(prefill_window=100, max_num_batched_tokens=100, max_num_seqs=8)
    engine.add("long", 200)
    passed = 0
    for arrived in range(20):
        engine.add(f"short {arrived}", 95)
        for span in engine.run().spans:
            if span.is_tail and span.request_id != "long":
                engine.scheduler.end(span.request_id, Outcome.FINISHED)
                passed += engine.scheduler.state("long") != "decoding"
    assert engine.scheduler.state("long") == "decoding"
    assert passed == 9, "95-token prompts pass until 4 times 200 tokens were computed"


def test_several_short_prompts_share_an_iteration():
    engine = EngineFake(**TOKENS_ONLY, max_num_partial_prefills=3)
    for name in "abcd":
        engine.add(name, 20)
    assert [s.request_id for s in engine.run().spans] == ["a", "b", "c"]


def test_a_threshold_leaves_room_beside_a_long_prompt():
    engine = EngineFake(
        **TOKENS_ONLY, long_prefill_token_threshold=32, max_num_batched_tokens=64
    )
    engine.add("a", 40)
    engine.add("b", 200)
    spans = engine.run().spans
    assert [(s.request_id, s.tokens) for s in spans] == [("a", 32), ("b", 32)]


def test_time_target_bounds_spans_only_while_streams_decode():
    engine = EngineFake(decode_s=0.01, token_s=0.001, target_itl_s=0.05)
    engine.add("first", 2000)
    assert engine.run().spans[0].tokens > 1000
    engine.add("long", 3000)
    engine.run_until_decoding("long")
    lengths = [end - start for start, end in engine.spans("long")]
    assert max(lengths[10:-1]) <= 40
    assert min(lengths[10:-1]) >= 30
    assert engine.steps[-1].target_s == 0.05


def test_relative_target_is_a_multiple_of_the_undisturbed_step():
    engine = EngineFake(decode_s=0.02, token_s=0.001, relative_itl_target=3.0)
    engine.add("stream", 10)
    for _ in range(60):
        engine.run()
    engine.add("long", 3000)
    engine.run_until_decoding("long")
    lengths = [end - start for start, end in engine.spans("long")]
    assert engine.steps[-1].target_s == pytest.approx(0.06, rel=0.05)
    assert max(lengths[30:-1]) == pytest.approx(40, abs=4)


def test_prefill_keeps_its_share_when_the_target_cannot_be_kept():
    engine = EngineFake(decode_s=0.05, target_itl_s=0.01, min_prefill_tokens=16)
    engine.add("stream", 10)
    engine.run()
    engine.add("long", 160)
    assert engine.run_until_decoding("long") == 10
    assert engine.steps[-2].why is Why.GUARANTEED_SHARE


def test_a_completed_prompt_is_a_stream_for_the_rest_of_its_iteration():
    engine = EngineFake(token_s=0.01, target_itl_s=0.2)
    engine.add("warm", 400)
    engine.run(finished=["warm"])
    engine.add("short", 20)
    engine.add("long", 2000)
    spans = engine.run().spans
    assert [s.request_id for s in spans] == ["short"]


def test_state_advances_only_over_what_was_computed():
    engine = EngineFake(**TOKENS_ONLY, prefill_window=50, max_num_batched_tokens=200)
    engine.add("a", 180)
    engine.run(undone_spans=[1])
    assert engine.computed["a"] == list(range(50))
    engine.run_until_decoding("a")
    assert engine.computed["a"] == list(range(180))


def test_a_failed_request_ends_alone():
    engine = EngineFake()
    engine.add("good", 10)
    engine.add("bad", 20)
    engine.run(failed=["bad"])
    assert [(e.request_id, e.outcome) for e in engine.ended] == [("bad", Outcome.FAILED)]
    assert engine.run().decoding == ("good",)


def test_a_failed_stream_keeps_the_count_of_its_last_good_step():
    engine = EngineFake()
    engine.add("a", 10)
    for _ in range(3):
        engine.run()
    engine.run(failed=["a"])
    assert (engine.ended[0].num_computed_tokens, engine.ended[0].decoded_tokens) == (10, 2)


def test_a_decode_that_did_not_run_is_scheduled_again():
    engine = EngineFake()
    engine.add("a", 10)
    engine.run()
    engine.run(decode_fails=True)
    step = engine.run()
    assert step.decoding == ("a",)
    assert step.decode_depth_tokens == 10


def test_cancel_between_schedule_and_apply():
    engine = EngineFake()
    engine.add("a", 10)
    engine.start()
    step = engine.scheduler.schedule()
    ended = engine.scheduler.end("a", Outcome.CANCELLED)
    assert ended is not None
    assert ended.num_computed_tokens == 0
    assert engine.scheduler.apply(step, StepResult(span_s=(0.1,))) == ()
    assert engine.scheduler.end("a", Outcome.CANCELLED) is None
    assert engine.scheduler.schedule().is_empty


def test_what_a_waiting_request_hoped_to_restore_was_not_restored():
    engine = EngineFake()
    engine.add("a", 10, cached=9)
    ended = engine.scheduler.end("a", Outcome.CANCELLED)
    assert ended is not None
    assert ended.num_computed_tokens == 0


def test_deadlines_end_requests_in_any_state():
    engine = EngineFake(max_num_seqs=1)
    engine.add("runs", 10, deadline_s=5.0)
    engine.run()
    engine.add("waits", 10, deadline_s=3.0)
    engine.add("patient", 10)
    assert engine.scheduler.expire(2.9) == ()
    assert [e.request_id for e in engine.scheduler.expire(5.0)] == ["waits", "runs"]
    engine.scheduler.check()
    assert engine.run().spans[0].request_id == "patient"


def test_queue_is_bounded_beyond_the_free_seats():
    engine = EngineFake(max_num_seqs=2, max_queue=3)
    for i in range(5):
        engine.add(f"r{i}", 10_000)
    with pytest.raises(QueueFullError) as error:
        engine.add("one more", 10)
    assert 1.0 <= error.value.retry_after_s <= 60.0


def test_without_chunking_a_prompt_is_one_span_beyond_window_and_edges():
    engine = EngineFake(
        enable_chunked_prefill=False, max_num_batched_tokens=1000, prefill_window=64
    )
    engine.add("stream", 10)
    engine.run()
    engine.add("a", 900, cached=100, edges=[300])
    engine.run()
    assert engine.spans("a") == [(100, 900)]


def test_without_chunking_a_prompt_above_the_budget_is_refused_at_once():
    engine = EngineFake(
        enable_chunked_prefill=False, max_num_batched_tokens=1000, max_num_seqs=5
    )
    engine.add("fits beside four streams", 996)
    with pytest.raises(InvalidRequestError, match="at most 996"):
        engine.add("too long", 997)
    assert engine.scheduler.waiting == 1


def test_stall_is_what_streams_waited_and_who_made_them():
    engine = EngineFake(**TOKENS_ONLY, token_s=0.5)
    engine.add("stream", 10)
    engine.run()
    engine.add("long", 30)
    engine.run()
    assert engine.scheduler.stall("stream").suffered_s == 15.0
    assert engine.scheduler.stall("stream").caused_s == 0.0
    assert engine.scheduler.stall("long").caused_s == 15.0
    assert engine.scheduler.stall("long").suffered_s == 0.0


def test_a_stream_born_in_an_iteration_suffers_what_follows_it():
    engine = EngineFake(**TOKENS_ONLY, token_s=0.5)
    engine.add("short", 10)
    engine.add("long", 30)
    engine.run()
    assert engine.scheduler.stall("short").suffered_s == 15.0
    assert engine.scheduler.stall("long").caused_s == 15.0
    assert engine.scheduler.stall("long").suffered_s == 0.0
