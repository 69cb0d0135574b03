"""``mtplx simulate``: the table, the timelines, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from mtplx.cli.main import app
from mtplx.errors import ConfigError

ENVIRONMENT = {"COLUMNS": "100", "NO_COLOR": "1"}


def run(*arguments):
    words = ["simulate", *map(str, arguments)]
    return CliRunner().invoke(app, words, env=ENVIRONMENT, catch_exceptions=False)


def worst_gaps_ms(output):
    """Return the worst gap of each policy, by its name."""
    rows = re.findall(r"^(\S.*?)\s{2,}[\d.]+ ms\s+[\d.]+ ms\s+([\d.]+) ms", output, re.M)
    return {name: float(worst) for name, worst in rows}


def test_a_smaller_budget_shortens_the_worst_gap():
    result = run()
    assert result.exit_code == 0
    worst = worst_gaps_ms(result.output)
    assert worst["no chunking"] > 400
    assert 100 < worst["budget 2048"] < 200
    assert worst["budget 512"] < 45
    assert worst["default target"] < worst["budget 512"]


def test_a_target_a_trace_and_a_measured_cost(tmp_path):
    trace, cost = tmp_path / "trace.jsonl", tmp_path / "cost.json"
    arrivals = [{"at_s": 0, "prompt_tokens": 10, "new_tokens": 200}] * 3
    arrivals.append({"at_s": 1.0, "prompt_tokens": 3000, "new_tokens": 5})
    trace.write_text("\n".join(map(json.dumps, arrivals)))
    cost.write_text(json.dumps({"decode_s": 0.01, "span_s": 0.005, "span_token_s": 1e-4}))
    result = run("--trace", trace, "--fit", cost, "--target-itl-ms", 30, "--budgets", "256")
    assert result.exit_code == 0
    worst = worst_gaps_ms(result.output)
    assert set(worst) == {"no chunking", "budget 256", "target 30 ms"}
    assert worst["target 30 ms"] <= 30


def test_the_timelines_become_a_picture(tmp_path):
    pytest.importorskip("PIL", reason="the picture needs the optional extra `plot`")
    picture = tmp_path / "timeline.png"
    assert run("--png", picture).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--budgets", "many"), "--budgets cannot be 'many'"),
        (("--budgets", "10"), "max_num_batched_tokens=10"),
        (("--trace", "/none"), "/none cannot be read"),
        (("--fit", "/none"), "/none cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_said(arguments, said):
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    assert said in str(caught.value)
