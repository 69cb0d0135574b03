"""The command line with a tiny model folder: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mtplx import __version__
from mtplx.cli.main import app
from mtplx.config import Settings
from mtplx.metrics import PrefillMetrics
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved
from tests.server.conftest import Server
from tests.server.fakes import INFO

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
    report, chart = tmp_path / "report.json", tmp_path / "chart.png"
    arguments = ["--cases", "pp64,pp32@d64", "--repeats", 2, "--prefill-window", 32]
    files = ["--json", report, "--plot", chart]
    shown = run("prefill-bench", folder, *arguments, *files).output
    for heading in ("case", "prefill tok/s", "compute tok/s", "TTFT s", "peak MiB"):
        assert heading in shown
    found = json.loads(report.read_text())
    (subject,) = found["subjects"]
    told = [
        (row["case"], row["mode"], row["cached_tokens"], row["new_prefill_tokens"])
        for row in subject["rows"]
    ]
    assert told == [("pp64", "cold", 0, 64), ("pp32@d64", "memory", 64, 32)]
    assert found["settings"]["prefill_window"] == 32
    assert (subject["name"], subject["model"]["name"]) == ("tiny", "tiny")
    assert set(found["versions"]) == {"python", "mtplx", "mlx", "mlx-lm"}
    assert chart.read_bytes().startswith(b"\x89PNG")
    compared = run("prefill-bench", "--compare", report, report).output
    assert len(re.findall(r"1\.00", compared)) == 4


def test_prefill_bench_measures_servers_at_urls(tmp_path):
    server = Server()
    report = tmp_path / "report.json"
    urls = ["--url", f"a={server.url}", "--url", f"b={server.url}/v1#{INFO.name}"]
    try:
        run("prefill-bench", *urls, "--cases", "pp9", "--repeats", 1, "--json", report)
    finally:
        server.stop()
    subjects = json.loads(report.read_text())["subjects"]
    assert [(each["name"], each["url"]) for each in subjects] == [
        ("a", server.url),
        ("b", server.url),
    ]
    assert [each["model"]["name"] for each in subjects] == [INFO.name] * 2


def test_the_ladder_is_the_same_command(folder):
    shown = run(
        "bench", "prefill-ladder", folder, "--cases", "pp8@d40", "--repeats", 1
    ).output
    assert "memory" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--cases", "pp1k"), "tokens for tiny, not 1024"),
        (("--url", "127.0.0.1:8000"), "Write NAME=URL"),
        (("--compare", "/none", "/none"), "/none cannot be read"),
    ],
)
def test_a_bench_that_cannot_be_is_refused(folder, arguments, said):
    done = command("prefill-bench", folder, *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


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
    from mtplx.prefill_bench import Row

    shared = {"cached_tokens", "new_prefill_tokens", "prefill_tok_s", "ttft_s"}
    assert shared <= set(Row.__dataclass_fields__)
    assert shared <= set(PrefillMetrics.__dataclass_fields__)
