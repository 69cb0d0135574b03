"""``mtplx doctor``: what is wrong is found, and doing what it says makes it right."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from mtplx.backend import BlasInfo
from mtplx.cli import checks, model_checks
from mtplx.cli.checks import Machine
from mtplx.cli.main import app
from mtplx.config import Settings
from mtplx.models.survey import survey
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved
from tests.session.disk_state import DENSE, open_tier, store

GIB = 1024**3
WELL = Machine(
    device="cpu",
    total_bytes=16 * GIB,
    available_bytes=12 * GIB,
    physical_bytes=16 * GIB,
    platform="linux",
    blas=BlasInfo("OpenBLAS"),
    compiler="/usr/bin/g++",
)


@pytest.fixture(autouse=True)
def without_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MTPLX_CONFIG", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny_llama())


def examined(*arguments, code=0):
    """Return what the command found, by check."""
    words = ["doctor", *map(str, arguments), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output
    report = json.loads(result.output)
    assert report["ok"] == (code == 0)
    return {finding["check"]: finding for finding in report["findings"]}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def commands(text):
    """Return the commands that a fix names."""
    return re.findall(r"`([^`]+)`", text)


def mtplx(command, code=0):
    program, *words = shlex.split(command)
    assert program == "mtplx"
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code, result.output


def test_all_is_well(model):
    found = examined(model, "--port", free_port())
    assert {f["status"] for f in found.values()} <= {"ok", "warning"}
    assert {"machine", "versions", "disk", "port", "model", "memory"} <= found.keys()
    assert "caches 2 trimmable" in found["model"]["found"]
    assert all((f["fix"] is None) == (f["status"] == "ok") for f in found.values()), (
        "each finding that is not well has its fix"
    )


def test_it_prints_a_table_for_people(model):
    words = ["doctor", str(model), "--port", str(free_port())]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).output
    assert re.search(r"ok\s+port\s+127\.0\.0\.1, port \d+ is free", shown)


def test_a_taken_port(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = examined(model, "--port", port, code=1)["port"]
        assert found["status"] == "problem"
        assert f"Port {port} on 127.0.0.1 is taken" in found["found"]
        other = re.search(r"--port (\d+)", found["fix"])[1]
        assert examined(model, "--port", other)["port"]["status"] == "ok"
    assert examined(model, "--port", port)["port"]["status"] == "ok"


WITHOUT_OPENBLAS = """
import ctypes, sys
load = ctypes.CDLL
def cdll(name, *args, **options):
    if "openblas" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    return load(name, *args, **options)
ctypes.CDLL = cdll
from mtplx.cli.main import main
sys.argv = ["mtplx", *sys.argv[1:]]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux needs OpenBLAS")
def test_without_openblas(model):
    arguments = ["doctor", str(model), "--port", str(free_port()), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_OPENBLAS, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}["blas"]
    assert found["status"] == "problem"
    assert "80 times slower" in found["found"]
    assert "cannot open shared object file" in found["found"]
    assert commands(found["fix"]) == ["pip install cmeel-openblas"]


def test_blas_and_compiler_matter_only_where_the_cpu_computes():
    bad = replace(WELL, blas=BlasInfo("MLX's own", "Slow.", "Fix."), compiler=None)
    found = {each.check: each.status for each in checks.check_device(bad)}
    assert found == {"blas": "problem", "compiler": "warning"}
    on_gpu = replace(bad, device="gpu", gpu={"device_name": "Apple M9"}, platform="darwin")
    assert [(f.check, f.found) for f in checks.check_device(on_gpu)] == [
        ("gpu", "Apple M9")
    ]
    mac = replace(WELL, platform="darwin")
    assert [f.status for f in checks.check_device(mac)] == ["problem", "ok", "ok"]


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "kv"
    tier = open_tier(folder)
    store(tier, DENSE, range(100, 120), max_piece_tokens=16)
    assert tier.flush(60)
    tier.close()
    return folder


def damage_file(folder):
    file = sorted((folder / "segments").iterdir())[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def damage_index(folder):
    (folder / "index.sqlite").write_bytes(b"SQLite format 3\0" + b"?" * 4096)


@pytest.mark.parametrize("damage", [damage_file, damage_index])
def test_a_damaged_disk_folder(model, disk, damage):
    arguments = (model, "--port", free_port(), "--kv-disk", disk)
    assert examined(*arguments)["disk"]["status"] == "ok"
    damage(disk)
    found = examined(*arguments, code=1)["disk"]
    assert found["status"] == "problem"
    assert "is damaged" in found["found"]
    (command,) = commands(found["fix"])
    mtplx(command)
    assert examined(*arguments)["disk"]["status"] == "ok"


def test_a_disk_folder_that_others_can_read(model, disk):
    disk.chmod(0o755)
    arguments = (model, "--port", free_port(), "--kv-disk", disk)
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments), "--json"])
    told = [f for f in json.loads(result.output)["findings"] if f["check"] == "disk"]
    assert told[0]["status"] == "warning"
    (command,) = commands(told[0]["fix"])
    subprocess.run(shlex.split(command), check=True)
    assert examined(*arguments)["disk"]["status"] == "ok"


def test_a_disk_folder_that_is_a_file(model, tmp_path):
    (tmp_path / "kv").write_text("")
    found = examined(model, "--port", free_port(), "--kv-disk", tmp_path / "kv", code=1)
    assert "is no folder" in found["disk"]["found"]


def test_a_disk_that_is_too_small(disk):
    settings = Settings(kv_disk=str(disk), kv_disk_bytes=1 << 60)
    (found,) = checks.check_disk(settings)
    assert found.status == "warning"
    most = int(re.search(r"--kv-disk-bytes to (\d+)", found.fix)[1])
    smaller = settings.model_copy(update={"kv_disk_bytes": most})
    assert [each.status for each in checks.check_disk(smaller)] == ["ok"]


def memory(model, *, dtype="auto", **changes):
    seen = survey(model)
    return model_checks.check_memory(seen, Settings(dtype=dtype), replace(WELL, **changes))


def test_memory_that_is_enough(model):
    found = memory(model)
    assert found.status == "ok"
    assert "for KV state" in found.found


def test_too_little_memory_for_the_model(model):
    needed = survey(model).network.float32_bytes
    tiny = memory(model, dtype="model", total_bytes=needed, available_bytes=needed)
    assert tiny.status == "problem"
    assert "does not fit" in tiny.found
    assert "fewer parameters" in tiny.fix


def test_memory_that_others_use(model):
    busy = memory(model, dtype="model", available_bytes=GIB // 32)
    assert busy.status == "problem"
    needed = float(re.search(r"([\d.]+) GiB must be free", busy.fix)[1])
    # Rounded to hundredths.
    freed = memory(model, dtype="model", available_bytes=int((needed + 0.01) * GIB))
    assert freed.status != "problem"


def test_memory_that_macos_keeps_from_the_gpu(model):
    mac = {"device": "gpu", "platform": "darwin", "total_bytes": GIB // 32}
    found = memory(model, **mac)
    assert found.status == "problem"
    limit = int(re.search(r"iogpu\.wired_limit_mb=(\d+)", found.fix)[1])
    raised = memory(model, **mac | {"total_bytes": limit * 2**20})
    assert raised.status != "problem"


def test_a_dtype_that_does_not_fit(model, monkeypatch):
    seen = survey(model)
    seen = replace(seen, network=replace(seen.network, float32_bytes=100 * GIB))
    found = model_checks.check_memory(seen, Settings(dtype="float32"), WELL)
    assert found.status == "problem"
    assert commands(found.fix) == ["--dtype model"]
    as_stored = model_checks.check_memory(seen, Settings(dtype="model"), WELL)
    assert as_stored.status == "ok"


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("nobody/no-such-model", "warning", "mtplx models pull nobody/no-such-model"),
        ("./none", "problem", "config.json"),
        ("a/b/c", "problem", "hub id"),
    ],
)
def test_a_model_that_is_not_here(name, status, said):
    found = examined(name, "--port", free_port(), code=int(status == "problem"))["model"]
    assert found["status"] == status
    assert said in found["fix"]


def test_a_model_that_is_incomplete(tmp_path):
    folder = saved(tmp_path / "tiny", tiny_llama())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    found = examined(folder, "--port", free_port(), code=1)["model"]
    size = weights.stat().st_size
    assert f"has {size:,} bytes and should have {size + 8:,}" in found["found"]


def test_versions_that_are_too_old(monkeypatch):
    monkeypatch.setattr(checks, "requires", lambda name: ["mlx>=99", "rich>=1", "nosuch>2"])
    found = checks.check_versions()
    assert found.status == "problem"
    assert commands(found.fix) == ["pip install -U 'mlx>=99' 'nosuch>2'"]
