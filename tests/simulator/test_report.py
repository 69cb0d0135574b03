import importlib.util

import pytest

from mtplx.errors import ConfigError
from mtplx.scheduler.cost_model import StepCost
from mtplx.simulator.report import compare_policies

has_pillow = importlib.util.find_spec("PIL") is not None


def test_a_table_of_policies_and_a_timeline_of_each():
    text = compare_policies(budgets=[512], streams=2, width=60)
    assert text.splitlines()[1].split()[:2] == ["no", "chunking"]
    names = ("no chunking", "budget 512", "default target")
    assert all(text.splitlines().count(name) == 1 for name in names)
    lanes = [line for line in text.splitlines() if line.strip().startswith("r0 (32)")]
    assert len(lanes) == 3
    assert "_" * 20 in lanes[0], "without chunking the stream stands still"
    assert "_" * 20 not in lanes[1]


def test_a_measured_cost_and_a_trace_replace_the_defaults(tmp_path):
    fit, trace = tmp_path / "cost.json", tmp_path / "trace.jsonl"
    fit.write_text(StepCost(decode_s=1.0, span_token_s=1.0).dumps())
    trace.write_text('{"at_s": 0, "prompt_tokens": 3, "new_tokens": 2}\n')
    text = compare_policies(fit=fit, trace=trace, target_itl_ms=5000)
    row = next(line for line in text.splitlines() if line.startswith("target 5000 ms"))
    assert row.split()[3:9:2] == ["1000.0", "1000.0", "1000.0"]
    assert "3000.0 ms" in row


def test_a_budget_that_cannot_work_is_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=20"):
        compare_policies(budgets=[20])


def test_an_empty_trace_is_an_empty_picture(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("")
    assert "budget 512" in compare_policies(trace=trace)


@pytest.mark.skipif(not has_pillow, reason="Pillow is not installed")
def test_a_png_shows_one_panel_for_each_policy(tmp_path):
    from PIL import Image

    path = tmp_path / "timeline.png"
    compare_policies(budgets=[512], streams=3, png=path)
    with Image.open(path) as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
        assert image.height == 3 * (34 + 5 * 32 + 34)
    assert {(0x4C, 0x78, 0xA8), (0xF5, 0x85, 0x18)} <= colours


@pytest.mark.skipif(has_pillow, reason="Pillow is installed")
def test_without_pillow_a_png_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"mtplx\[plot\]"):
        compare_policies(streams=1, png=tmp_path / "timeline.png")
