"""The command line with a tiny model folder: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mtplx import __version__
from mtplx.cli.bench import parse_contexts
from mtplx.cli.main import app
from mtplx.config import Settings
from mtplx.errors import ConfigError
from mtplx.metrics import PrefillMetrics
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny_llama())


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(word) for word in arguments], env=WIDE)
    assert result.exit_code == code, result.output
    return result


def command(*arguments):
    program = "from mtplx.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def test_version():
    assert run("--version").output == f"mtplx {__version__}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help")])
def test_help_answers_without_loading_mlx(arguments):
    code = (
        "import sys; from typer.testing import CliRunner; from mtplx.cli.main import app;"
        f"r = CliRunner().invoke(app, {list(arguments)!r});"
        "assert r.exit_code == 0 and 'serve' in r.output; print('mlx.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_serve_has_a_flag_for_every_setting():
    shown = run("serve", "--help").output
    for name, setting in Settings.model_fields.items():
        assert name == "model" or f"--{name.replace('_', '-')}" in shown
        if setting.default is not None:
            assert f"[default: {setting.default}]" in shown


def test_plan_of_a_text(folder, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("abc" * 30)
    shown = run("plan", prompt, folder, "--prefill-window", 40, "--tail-grid", 8).output
    total = int(re.search(r"a prompt of (\d+) tokens", shown)[1])
    assert f"Restored: none (never_seen). Computed: {total}." in shown
    ends = [int(end) for end in re.findall(r"│\s+(?:\d+|tail) │\s+\d+ │\s+(\d+) │", shown)]
    assert ends[0] == 40
    assert ends[-1] == total


def test_plan_says_what_would_be_restored(folder, tmp_path):
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("abc" * 30)
    second.write_text("abc" * 30 + "and more")
    alone = run("plan", first, folder).output
    known = int(re.search(r"a prompt of (\d+) tokens", alone)[1])
    shown = run("plan", second, folder, "--after", first).output
    restored = int(re.search(r"Restored: (\d+)\.", shown)[1])
    # The last token of the first prompt may join with what follows it.
    assert known - 1 <= restored <= known


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "cannot be read"),
        ("bad.json", "{", "is not JSON"),
        ("odd.json", '{"messages": "hello"}', "list of messages"),
        ("empty.txt", "", "no tokens"),
    ],
)
def test_a_prompt_that_cannot_be_used(folder, tmp_path, name, content, said):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    done = command("plan", path, folder)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_prefill_bench_measures_cold_and_warm(folder, tmp_path):
    report = tmp_path / "report.json"
    arguments = ["--contexts", "64,96", "--repeats", 2, "--prefill-window", 32]
    shown = run("prefill-bench", folder, *arguments, "--json", report).output
    for heading in (
        "tokens",
        "prefill tok/s",
        "compute tok/s",
        "TTFT s",
        "peak MiB",
        "spans",
    ):
        assert heading in shown
    found = json.loads(report.read_text())
    rows = [
        (
            row["context_tokens"],
            row["state"],
            row["cached_tokens"],
            row["new_prefill_tokens"],
        )
        for row in found["rows"]
    ]
    assert rows == [
        (64, "cold", 0, 64),
        (64, "warm", 32, 32),
        (96, "cold", 0, 96),
        (96, "warm", 64, 32),
    ]
    for row in found["rows"]:
        assert 0 < row["ttft_min_s"] <= row["ttft_s"] <= row["ttft_max_s"]
        assert 0 < row["prefill_tok_s"] <= row["prefill_compute_tok_s"]
        assert row["peak_bytes"] > 0
    assert [row["spans"] for row in found["rows"]] == [2, 1, 3, 1]
    assert found["settings"]["prefill_window"] == 32
    assert found["model"]["name"] == "tiny"
    assert set(found["versions"]) == {"python", "mtplx", "mlx", "mlx-lm"}


def test_the_ladder_is_the_same_command(folder):
    shown = run(
        "bench", "prefill-ladder", folder, "--contexts", "40", "--repeats", 1
    ).output
    assert "warm" in shown


def test_a_context_that_does_not_fit_is_refused(folder):
    done = command("prefill-bench", folder, "--contexts", "1k")
    assert done.returncode == 1
    assert "tokens for tiny, not 1024" in done.stderr
    assert "Traceback" not in done.stderr


def test_contexts():
    assert parse_contexts("512,1k, 2K") == [512, 1024, 2048]
    for wrong in ("", "1.5k", "-1", "0", "1k,,2k", "1m"):
        with pytest.raises(ConfigError, match="512,1k,2k"):
            parse_contexts(wrong)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "/no/such/folder"), "There is no model at"),
        (("serve", "demo", "--dtype", "int4"), "'dtype' from the flag cannot be 'int4'"),
        (("serve", "demo", "--config", "/none.toml"), "does not exist"),
        (("serve", "demo", "--device", "gpu"), "MLX sees no GPU here"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, said):
    if "gpu" in arguments:
        import mlx.core as mx

        if mx.is_available(mx.gpu):
            pytest.skip("MLX has a GPU here, so asking for one is no error")
    done = command(*arguments, *(["--port", "0"] if arguments[0] == "serve" else []))
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_metrics_and_rows_use_the_same_words():
    from mtplx.prefill_bench import LadderRow

    shared = {"cached_tokens", "new_prefill_tokens", "prefill_tok_s", "ttft_s"}
    assert shared <= set(LadderRow.__dataclass_fields__)
    assert shared <= set(PrefillMetrics.__dataclass_fields__)
