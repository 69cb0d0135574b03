"""``mtplx verify`` prints a certificate, writes it, and fails when a check does."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mtplx.cli.main import app
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved
from tests.test_verify import NAMES, WrongInLaterSpans, with_text

SHORT = ("--tokens", 96, "--new-tokens", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny_llama())


def run(*arguments, code=0):
    words = ["verify", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "220", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return result.output


def test_the_certificate_of_a_folder(folder, tmp_path):
    report = tmp_path / "certificate.json"
    shown = run(folder, *SHORT, "--json", report)
    for name in NAMES:
        assert f"│ {name} " in shown
    for words in ("model      tiny, float32, fingerprint ", "96 tokens and 4 new", "0.001"):
        assert words in shown
    assert "PASSED: 11 checks" in shown
    assert "restored tokens 64" in shown
    found = json.loads(report.read_text())
    assert found["passed"]
    assert found["model"]["fingerprint"] in shown
    assert found["date"] in shown
    assert [check["name"] for check in found["checks"]] == [*NAMES]
    assert all(check["passed"] for check in found["checks"])
    assert found["settings"]["tokens"] == 96
    assert found["tolerance"] == 1e-3
    assert set(found["versions"]) == {"python", "mtplx", "mlx", "mlx-lm"}


def test_a_model_that_fails_ends_with_code_1(tmp_path, monkeypatch):
    broken = with_text("llama", WrongInLaterSpans)
    monkeypatch.setattr("mtplx.cli.verify.load_with_progress", lambda *arguments: broken)
    report = tmp_path / "certificate.json"
    shown = run(*SHORT, "--json", report, code=1)
    assert "FAILED: chunked, " in shown
    assert "off by more than rounding" in shown
    assert "the most likely token is" in shown
    found = json.loads(report.read_text())
    assert not found["passed"]
    assert found["checks"][0]["passed"]
    assert found["checks"][1]["verdict"] == "different"


def test_the_window_may_be_chosen(folder, tmp_path):
    report = tmp_path / "certificate.json"
    run(folder, *SHORT, "--prefill-window", 10, "--json", report)
    chunked = json.loads(report.read_text())["checks"][1]
    assert chunked["reach"] == {"spans": 11, "longest span": 10}
