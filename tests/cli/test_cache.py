"""``mtplx cache`` on a folder: what it shows, what it removes, and how it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mtplx.cli.main import app
from mtplx.errors import ConfigError
from tests.session.disk_state import DENSE, HYBRID, fetch, open_tier, store

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def run(*arguments, code=0):
    words = ["cache", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env=WIDE)
    assert result.exit_code == code, result.output
    return result.output


def refused(*arguments):
    words = ["cache", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env=WIDE)
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


@pytest.fixture(autouse=True)
def without_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MTPLX_CONFIG", raising=False)


@pytest.fixture
def folder(tmp_path):
    tier = open_tier(tmp_path / "kv")
    store(tier, DENSE, range(100, 120), max_piece_tokens=16)
    store(tier, HYBRID, range(8), (4, 8), max_piece_tokens=16)
    assert tier.flush(60)
    fetch(tier, DENSE, range(100, 120))
    tier.close()
    return tmp_path / "kv"


def segment_file(folder):
    return sorted((folder / "segments").iterdir())[0]


def test_ls(folder):
    shown = run("ls", "--kv-disk", folder)
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()
    ]
    cells = sorted((line for line in lines if line), key=lambda line: (line[5], line[0]))
    about = [[line[0], *line[2:4], *line[5:]] for line in cells]
    assert about == [
        ["0-16", "0", "2", "dense", "100 101 102 103 104 105 ..."],
        ["16-20", "0", "2", "dense", "116 117 118 119"],
        ["0-8", "2", "1", "hybrid", "0 1 2 3 4 5 ..."],
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", line[4]) for line in cells)
    total = sum(int(line[1].replace(",", "")) for line in cells)
    assert total == sum(file.stat().st_size for file in (folder / "segments").iterdir())


def test_stats(folder, monkeypatch):
    monkeypatch.setenv("MTPLX_KV_DISK", str(folder))
    shown = run("stats", "--kv-disk-bytes", 5_000_000)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert re.search(r"segments +3 with 28 tokens", shown)
    assert re.search(r"snapshots +2\n", shown)
    assert re.search(r"models +2\n", shown)
    assert re.search(rf"bytes +{size:,} of 5,000,000\n", shown)
    assert re.search(r"quarantined +0\n", shown)


def test_verify(folder):
    assert re.match(
        r"5 files with [\d,]+ bytes checked, 0 bad\.", run("verify", "--kv-disk", folder)
    )
    (folder / "segments" / f"{'a' * 40}.0.safetensors").touch()
    assert "0 bad; 1 files without an entry." in run("verify", "--kv-disk", folder)
    bad = segment_file(folder)
    data = bytearray(bad.read_bytes())
    data[-1] ^= 128
    bad.write_bytes(data)
    shown = run("verify", "--kv-disk", folder, code=1)
    assert f"bad: {bad.name}: its checksum is wrong" in shown
    bad.unlink()
    shown = run("verify", "--kv-disk", folder, code=1)
    assert f"bad: {bad.name}: it cannot be read (No such file or directory)" in shown


def test_verify_of_a_damaged_index(folder):
    (folder / "index.sqlite").write_bytes(b"not a database" * 999)
    assert "bad: index.sqlite: file is not a database" in run(
        "verify", "--kv-disk", folder, code=1
    )
    assert "`mtplx cache gc`" in refused("ls", "--kv-disk", folder)
    assert "set aside 1" in run("gc", "--kv-disk", folder)
    assert re.search(r"quarantined +1\n", run("stats", "--kv-disk", folder))


def test_gc(folder):
    (folder / "segments" / f"{'a' * 40}.0.safetensors.tmp").touch()
    shown = run("gc", "--kv-disk", folder)
    assert "Removed 1 files without an entry and 0 segments" in shown
    assert "3 segments in" in shown
    shown = run("gc", "--kv-disk", folder, "--kv-disk-bytes", 0)
    assert "Removed 0 files without an entry and 3 segments" in shown
    assert [*(folder / "segments").iterdir()] == []


def test_clear(folder):
    stranger = folder / "segments" / "notes.txt"
    stranger.write_text("mine")
    assert re.match(r"Removed [\d,]+ bytes\.", run("clear", "--kv-disk", folder))
    left = {
        file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()
    }
    assert left == {"lock", "segments/notes.txt"}
    tier = open_tier(folder)
    assert tier.match(DENSE, range(100, 120)) == 0
    tier.close()


def test_beside_a_server(folder):
    """What looks may look; what writes must wait."""
    tier = open_tier(folder)
    store(tier, DENSE, range(500, 510))
    assert tier.flush(60)
    assert "500 501" in run("ls", "--kv-disk", folder)
    assert "8 files" in run("verify", "--kv-disk", folder)
    owner = f"in use by process {os.getpid()} ("
    assert owner in refused("clear", "--kv-disk", folder)
    program = "from mtplx.cli.main import main; main()"
    words = [sys.executable, "-c", program, "cache", "gc", "--kv-disk", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert owner in done.stderr
    assert fetch(tier, DENSE, range(500, 510)).length == 9
    tier.close()


@pytest.mark.parametrize("name", ["ls", "stats", "verify", "gc", "clear"])
def test_no_folder(name, tmp_path, monkeypatch):
    monkeypatch.delenv("MTPLX_KV_DISK", raising=False)
    assert "--kv-disk DIR" in refused(name)
    assert "There is no KV state in" in refused(name, "--kv-disk", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"config"}
