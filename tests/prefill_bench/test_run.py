"""What is measured and what is made of it, with a server that tells what a test wants."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from mtplx.errors import ConfigError, InvalidRequestError
from mtplx.prefill_bench import compare, measure, parse_cases
from mtplx.prefill_bench.chart import draw_chart, rate_lines, ttft_lines
from mtplx.prefill_bench.targets import Sample, Streams


class FakeTarget:
    """Keeps prompts, as a bank would; each computed token takes 10 ms.

    Attributes:
        log: What it was asked for.
    """

    name = "fake"

    def __init__(self, *, tells_cached=True):
        self.log = []
        self.running = 0
        self._memory = set()
        self._disk = set()
        self._tells_cached = tells_cached

    def facts(self):
        return {"url": None, "model": {}}

    def check(self, prompt_tokens, modes):
        if prompt_tokens > 1000:
            raise InvalidRequestError("too long")

    def read(self, depth_tokens, new_tokens, *, known, new):
        self.log.append((depth_tokens, new_tokens))
        cached, source = 0, None
        if depth_tokens and known in self._memory | self._disk:
            cached = depth_tokens
            source = "memory" if known in self._memory else "disk"
        self._memory.add(known)
        self._disk.add(known)
        assert (new_tokens, new) not in self._disk, "a prompt must not come twice"
        self._disk.add((new_tokens, new))
        total = depth_tokens + new_tokens
        return Sample(
            total,
            cached if self._tells_cached else None,
            (total - cached) / 100,
            cache_source=source,
        )

    @contextmanager
    def streams(self, count, seed):
        self.running += count
        yield Streams([[0.0, float("inf")], []])
        self.running -= count

    def restart(self):
        self.log.append("restart")
        self._memory.clear()


def rows(target, cases, modes, **options):
    found = measure(target, parse_cases(cases), modes, **options)
    return {(row.case, row.mode): row for row in found}


def test_restored_tokens_are_in_no_rate():
    found = rows(FakeTarget(), "pp100,pp50@d300", ["cold", "memory", "disk"], repeats=2)
    assert list(found) == [
        ("pp100", "cold"),
        ("pp50@d300", "memory"),
        ("pp50@d300", "disk"),
    ]
    assert [(r.cached_tokens, r.new_prefill_tokens) for r in found.values()] == [
        (0, 100),
        (300, 50),
        (300, 50),
    ]
    assert [r.cache_source for r in found.values()] == [None, "memory", "disk"]
    assert [r.prefill_tok_s for r in found.values()] == pytest.approx([100, 100, 100])


def test_no_rate_where_nobody_says_what_was_restored():
    found = rows(FakeTarget(tells_cached=False), "pp50@d300", ["memory"])
    row = found["pp50@d300", "memory"]
    assert (row.prefill_tok_s, row.new_prefill_tokens) == (None, None)
    assert row.ttft_s == pytest.approx(0.5)


def test_one_run_is_not_counted():
    target = FakeTarget()
    counted = []
    measure(
        target,
        parse_cases("pp200,pp100"),
        ["cold"],
        repeats=2,
        on_run=lambda case, mode: counted.append(str(case)),
    )
    assert target.log == [(0, 100), (0, 200), (0, 200), (0, 100), (0, 100)]
    assert counted == ["pp200", "pp200", "pp100", "pp100"]


def test_from_disk_is_after_one_restart():
    target = FakeTarget()
    rows(target, "pp50@d300", ["disk"], repeats=2)
    known = [(300, 32)] * 2
    assert target.log[1:] == [*known, "restart", (300, 50), (300, 50)]


def test_streams_run_beside_a_contended_prompt():
    target = FakeTarget()
    seen = []
    read = target.read
    target.read = lambda *a, **k: seen.append(target.running) or read(*a, **k)
    row = rows(target, "pp50", ["contended"], repeats=1, streams=3)["pp50", "contended"]
    assert seen == [0, 3]
    assert row.worst_gap_s == float("inf")
    assert target.running == 0


def test_gaps_that_touch_the_time_of_the_prompt():
    streams = Streams([[0.0, 1.0, 5.0, 5.5], [4.0], []])
    assert streams.worst_gap_s(2.0, 3.0) == 4.0
    assert streams.worst_gap_s(5.1, 5.2) == 0.5
    assert streams.worst_gap_s(6.0, 7.0) is None


@pytest.mark.parametrize(
    ("cases", "modes", "said"),
    [
        ("pp50", ["memory"], "modes cold and contended"),
        ("pp50@d9", ["cold"], "modes memory, disk and contended"),
        ("pp50@d999", ["memory"], "too long"),
    ],
)
def test_what_cannot_be_measured_is_told_before_anything_is(cases, modes, said):
    target = FakeTarget()
    with pytest.raises(InvalidRequestError, match=said):
        measure(target, parse_cases(cases), modes)
    assert target.log == []


def subject(name, **changes):
    row = {
        "case": "pp50",
        "mode": "cold",
        "prompt_tokens": 50,
        "prefill_tok_s": 100.0,
        "ttft_s": 2.0,
        "worst_gap_s": None,
    }
    return {"name": name, "rows": [row | changes]}


def test_ratios_above_one_are_better():
    before = {"subjects": [subject("a", worst_gap_s=1.0)]}
    after = {"subjects": [subject("b", prefill_tok_s=150.0, ttft_s=1.0, worst_gap_s=0.5)]}
    (told,) = compare(before, after)
    assert (told.before, told.after) == ("a", "b")
    assert (told.tok_s_ratio, told.ttft_ratio, told.gap_ratio) == (1.5, 2.0, 2.0)


def test_several_servers_are_compared_by_name():
    before = {"subjects": [subject("a"), subject("b", prefill_tok_s=50.0)]}
    after = {"subjects": [subject("b"), subject("c")]}
    (told,) = compare(before, after)
    assert (told.before, told.tok_s_ratio, told.gap_ratio) == ("b", 2.0, None)


@pytest.mark.parametrize("report", [{}, {"rows": []}, {"subjects": [{"name": "a"}]}])
def test_what_is_no_report(report):
    with pytest.raises(ConfigError, match="no report"):
        compare(report, {"subjects": [subject("a")]})


def test_reports_without_a_common_case():
    other = {"subjects": [subject("a", case="pp60")]}
    with pytest.raises(ConfigError, match="no case in common"):
        compare({"subjects": [subject("a")]}, other)


def test_the_chart_has_a_line_for_each_server_and_mode(tmp_path):
    rows_ = [
        subject("", prompt_tokens=tokens, mode=mode, ttft_s=tokens / 10)["rows"][0]
        for tokens in (200, 100)
        for mode in ("cold", "memory", "contended")
    ]
    subjects = [{"name": "ours", "rows": rows_}, {"name": "theirs", "rows": rows_[:1]}]
    assert [(line.label, line.points) for line in rate_lines(subjects)] == [
        ("ours", [(100, 100.0), (200, 100.0)]),
        ("theirs", [(200, 100.0)]),
    ]
    assert [(line.label, line.pieces > 1) for line in ttft_lines(subjects)] == [
        ("ours: cold", False),
        ("ours: warm, memory", True),
        ("theirs: cold", False),
    ]
    draw_chart(tmp_path / "chart.png", subjects, "title")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_of_nothing_known(tmp_path):
    draw_chart(tmp_path / "chart.png", [subject("a", prompt_tokens=None)], "title")
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_chart(tmp_path / "no" / "chart.png", [], "title")
