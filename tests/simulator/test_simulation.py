import random

import pytest

from mtplx.errors import ConfigError
from mtplx.scheduler.config import RELATIVE_ITL_TARGET, SchedulerConfig
from mtplx.scheduler.cost_model import StepCost
from mtplx.simulator.report import long_prompt_among_streams, standard_policies
from mtplx.simulator.simulation import Arrival, read_trace, simulate

COST = StepCost(iteration_s=0.008, decode_row_s=7e-5, span_token_s=7e-5)
"""8 ms per iteration and 0.07 ms per token."""


@pytest.fixture(scope="module")
def runs():
    arrivals = long_prompt_among_streams(COST, streams=4, prompt_tokens=6000)
    policies = standard_policies([2048, 512], None, 6000, max_num_seqs=32)
    return {name: simulate(config, COST, arrivals) for name, config in policies.items()}


def test_a_long_prompt_freezes_running_streams_less_the_smaller_the_budget(runs):
    assert runs["no chunking"].gap_s(1.0) > 0.400
    assert runs["budget 2048"].gap_s(1.0) == pytest.approx(0.150, rel=0.05)
    assert runs["budget 512"].gap_s(1.0) < 0.045


def test_the_long_prompt_pays_for_it_with_its_first_token(runs):
    names = ["no chunking", "budget 2048", "budget 512", "default target"]
    ttfts = [runs[name].served[-1].ttft_s for name in names]
    assert ttfts == sorted(set(ttfts))


def test_the_default_target_keeps_gaps_and_costs_what_its_docstring_says(runs):
    run = runs["default target"]
    k = RELATIVE_ITL_TARGET
    assert run.gap_s(1.0) <= k * run.gap_s(0.5)
    alone_s = runs["no chunking"].served[-1].ttft_s
    assert run.served[-1].ttft_s < 1.15 * k / (k - 1) * alone_s


@pytest.mark.parametrize("target_ms", [15, 30, 100])
def test_a_target_is_kept_beside_a_prompt_ten_times_the_window(target_ms):
    rng = random.Random(target_ms)
    cost = StepCost(
        decode_s=0.008,
        decode_row_s=1e-4,
        span_s=0.002,
        span_token_s=7e-5,
        span_depth_s=4e-9,
    )
    streams = [Arrival(rng.random(), rng.randint(10, 100), 2000) for _ in range(6)]
    config = SchedulerConfig(target_itl_s=target_ms / 1e3, prefill_window=2048)
    run = simulate(config, cost, [*streams, Arrival(4.0, 20_480, 10)])
    assert run.served[-1].ttft_s is not None
    assert run.gap_s(0.99) <= target_ms / 1e3
    assert max(run.served[-1].gaps_s) <= target_ms / 1e3


def test_every_request_gets_all_its_tokens_and_who_stalls_whom_adds_up():
    rng = random.Random(3)
    arrivals = [
        Arrival(rng.uniform(0, 20), rng.randint(1, 900), rng.randint(1, 60))
        for _ in range(60)
    ]
    run = simulate(SchedulerConfig(max_num_seqs=6), COST, arrivals)
    assert [len(r.token_times_s) for r in run.served] == [
        r.arrival.new_tokens for r in run.served
    ]
    caused, suffered = (
        sum(getattr(r.stall, name) for r in run.served)
        for name in ("caused_s", "suffered_s")
    )
    assert 0 < caused <= suffered <= 6 * caused


def test_thousands_of_requests_and_a_million_token_prompt():
    rng = random.Random(4)
    arrivals = [
        Arrival(rng.uniform(0, 400), int(rng.lognormvariate(5, 1)) + 1, rng.randint(1, 40))
        for _ in range(3000)
    ]
    arrivals.append(Arrival(1.0, 1_000_000, 5))
    run = simulate(SchedulerConfig(), COST, arrivals)
    assert all(r.refusal is not None or r.ttft_s is not None for r in run.served)
    longest = max(run.served, key=lambda r: r.arrival.prompt_tokens)
    assert longest.ttft_s < 3 * 1_000_000 * COST.span_token_s


def test_a_refused_arrival_says_why():
    run = simulate(
        SchedulerConfig(max_num_seqs=1, max_queue=1), COST, [Arrival(0, 9, 9)] * 4
    )
    assert [r.refusal is None for r in run.served] == [True, True, False, False]
    assert "wait" in run.served[-1].refusal


def test_a_trace_is_read_line_by_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 2}\n\n')
    assert read_trace(path) == [Arrival(1, 5, 2)]
    path.write_text('{"at_s": 1, "prompt_tokens": 5, "new_tokens": 2}\n{"at_s": 1}\n')
    with pytest.raises(ConfigError, match="Line 2"):
        read_trace(path)


def test_an_arrival_without_anything_to_compute_is_refused():
    with pytest.raises(ConfigError, match="at least one prompt token"):
        Arrival(0.0, 5, 1, cached_tokens=5)
