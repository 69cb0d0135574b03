"""Law 1, for every length, window, edge and grid."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.generation import (
    _iter_prefill_chunk_spans,
    _prefill_spans_with_tail_grid,
    plan_prefill,
)
from mtplx.types import Prompt


def test_a_long_prompt_in_full_windows_and_a_tail():
    spans = list(_iter_prefill_chunk_spans(40_000, window=4096))
    assert spans[:9] == [(i * 4096, (i + 1) * 4096, False) for i in range(9)]
    assert spans[9:] == [(36864, 40000, True)]


def test_a_mandatory_edge_ends_a_span():
    spans = list(_iter_prefill_chunk_spans(100, [30, 60], window=50))
    assert spans == [(0, 30, False), (30, 60, False), (60, 100, True)]


@pytest.mark.parametrize(
    ("total", "window", "expected"),
    [
        (0, 4, []),
        (1, 4, [(0, 1, True)]),
        (4, 4, [(0, 4, True)]),
        (5, 4, [(0, 4, False), (4, 5, True)]),
    ],
)
def test_small_prompts(total, window, expected):
    assert list(_iter_prefill_chunk_spans(total, window=window)) == expected


def test_the_tail_is_cut_on_the_grid():
    spans = list(_prefill_spans_with_tail_grid(100, window=1000, tail_grid=32))
    assert spans == [(0, 96, False), (96, 100, True)]


def test_a_tail_that_would_end_on_the_grid_keeps_a_whole_cell():
    spans = list(_prefill_spans_with_tail_grid(96, window=1000, tail_grid=32))
    assert spans == [(0, 64, False), (64, 96, True)]


def test_a_short_tail_is_not_cut():
    spans = list(_prefill_spans_with_tail_grid(100, [70], window=1000, tail_grid=32))
    assert spans == [(0, 70, False), (70, 100, True)]


@pytest.mark.parametrize(
    "arguments",
    [{"window": 0}, {"window": -1}, {"window": 4, "start": 11}, {"window": 4, "start": -1}],
)
def test_nonsense_is_refused(arguments):
    with pytest.raises(ValueError, match=r"window|start"):
        list(_iter_prefill_chunk_spans(10, **arguments))
    with pytest.raises(ValueError, match="grid"):
        list(_prefill_spans_with_tail_grid(10, window=4, tail_grid=0))


lengths = st.integers(0, 400)
edge_lists = st.lists(st.integers(-50, 450), max_size=12)


@given(lengths, edge_lists, st.integers(1, 120), st.data())
def test_law_1(total, edges, window, data):
    start = data.draw(st.integers(0, total))
    spans = list(_iter_prefill_chunk_spans(total, edges, window=window, start=start))
    _check_law_1(spans, total, edges, window, start)


@given(lengths, edge_lists, st.integers(1, 120), st.integers(1, 64), st.data())
def test_law_1_with_a_tail_grid(total, edges, window, grid, data):
    start = data.draw(st.integers(0, total))
    spans = list(
        _prefill_spans_with_tail_grid(
            total, edges, window=window, tail_grid=grid, start=start
        )
    )
    _check_law_1(spans, total, edges, window, start)
    if spans:
        tail = spans[-1]
        assert tail.end - tail.start <= grid
        inner = [edge for edge in edges if start < edge < total]
        last_edge = max(inner, default=start)
        if total - last_edge > grid:
            assert (total - 1) // grid * grid in {span.end for span in spans}


def _check_law_1(spans, total, edges, window, start):
    position = start
    for span in spans:
        assert span.start == position
        assert 1 <= span.end - span.start <= window
        assert span.is_tail == (span.end == total)
        position = span.end
    assert position == total
    ends = {span.end for span in spans}
    assert {edge for edge in edges if start < edge < total} <= ends


@given(
    st.integers(1, 300),
    edge_lists,
    st.booleans(),
    st.integers(1, 120),
    st.integers(1, 64),
    st.data(),
)
def test_a_plan_keeps_state_only_where_spans_end(
    total, edges, any_prefix, window, grid, data
):
    restored = data.draw(st.integers(0, total - 1))
    prompt = Prompt(tuple(range(total)), tuple(edges), data.draw(st.integers(0, total)))
    plan = plan_prefill(
        prompt,
        restored_tokens=restored,
        any_prefix=any_prefix,
        window=window,
        tail_grid=grid,
    )
    wanted = () if any_prefix else (*edges, prompt.stable_prefix_len)
    _check_law_1(plan.spans, total, wanted, window, restored)
    assert plan.snapshots <= {span.end for span in plan.spans}
    assert plan.spans[-1].end - plan.spans[-1].start <= grid
    if any_prefix:
        assert not plan.snapshots
        assert not plan.edges
    else:
        inner = {edge for edge in wanted if restored < edge < total}
        assert plan.snapshots >= inner | {total}
        assert plan.snapshots == {*plan.edges, total}


@given(st.integers(2, 300), edge_lists, st.booleans(), st.integers(1, 120), st.data())
def test_a_plan_can_be_carried_out_in_pieces(total, edges, any_prefix, window, data):
    """A scheduler stops where it likes; together it is the whole prompt by law 1."""
    plan = plan_prefill(
        Prompt(tuple(range(total)), tuple(edges)),
        any_prefix=any_prefix,
        window=window,
        tail_grid=8,
    )
    stops = sorted({*data.draw(st.lists(st.integers(1, total), max_size=5)), total})
    spans, position = [], 0
    for stop in stops:
        spans += plan.spans_until(stop, position)
        position = stop
    _check_law_1(spans, total, plan.edges, window, 0)
    assert set(stops) <= {span.end for span in spans}
