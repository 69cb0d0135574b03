from mtplx.scheduler.itl import ItlRecorder, percentile


def test_counts_misses_against_the_target_of_the_moment():
    recorder = ItlRecorder()
    recorder.record(0.2, 0.1)
    recorder.record(0.2, 0.3)
    recorder.record(0.2, None)
    summary = recorder.summary()
    assert (summary.gaps, summary.misses, summary.target_s) == (3, 1, None)


def test_percentiles_are_of_recent_gaps_and_the_worst_is_of_all():
    recorder = ItlRecorder(recent=100)
    recorder.record(9.0, None)
    for i in range(1, 101):
        recorder.record(i / 100, None)
    summary = recorder.summary()
    assert (summary.p50_s, summary.p99_s, summary.worst_s) == (0.5, 0.99, 9.0)
    assert summary.gaps == 101


def test_nothing_recorded_is_none():
    summary = ItlRecorder().summary()
    assert summary.p50_s is summary.p99_s is summary.worst_s is None


def test_percentile_takes_the_nearest_rank():
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert percentile([1.0], 0.99) == 1.0
