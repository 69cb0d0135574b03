"""``mtplx models``: what is here, what it takes, and removing it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mtplx.cli.main import app
from mtplx.errors import ConfigError
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Both caches, with a model in each."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MTPLX_CACHE_DIR", str(tmp_path / "mtplx"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def fetched(caches, name):
    folder = caches / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "0"
    folder.parent.mkdir(parents=True)
    return saved(folder, tiny_llama())


def converted(caches, name):
    folder = caches / "mtplx" / "converted" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    return saved(folder, tiny_llama())


def run(*arguments, code=0, answer=None):
    words = ["models", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env=WIDE, input=answer)
    assert result.exit_code == code, result.output
    return result.output


def rows(shown):
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    return {cells[1]: cells[2:-1] for cells in lines if len(cells) > 2}


def test_none():
    assert "mtplx models pull demo" in run()


def test_what_each_takes_and_whether_it_fits(caches):
    fetched(caches, "org/tiny")
    folder = converted(caches, "other-0-1")
    assert rows(run()) == {
        "org/tiny": ["hub", "0.00 GiB", "512", "2 trimmable", "yes"],
        str(folder): ["converted", "0.00 GiB", "512", "2 trimmable", "yes"],
    }


def test_a_broken_one_says_why(caches):
    folder = fetched(caches, "org/tiny")
    (folder / "model.safetensors").unlink()
    shown = run()
    assert rows(shown)["org/tiny"][-1] == "broken"
    assert "org/tiny: " in shown
    assert "has no weights" in shown.replace("\n", " ")


def test_rm_asks(caches):
    folder = fetched(caches, "org/tiny")
    run("rm", "org/tiny", answer="n\n", code=1)
    assert folder.exists()
    assert "Removed org/tiny" in run("rm", "org/tiny", answer="y\n")
    assert not folder.exists()


def test_rm_without_asking(caches):
    folder, other = converted(caches, "one-0-1"), converted(caches, "two-0-1")
    run("rm", "one-0-1", "--yes")
    assert not folder.exists()
    run("rm", other, "--yes")
    assert rows(run()) == {}


def test_rm_leaves_other_folders_alone(caches, tmp_path):
    mine = saved(tmp_path / "mine", tiny_llama())
    result = CliRunner().invoke(app, ["models", "rm", str(mine), "--yes"])
    assert isinstance(result.exception, ConfigError)
    assert "is in no cache" in str(result.exception)
    assert mine.exists()
