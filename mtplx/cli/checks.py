"""What `mtplx doctor` looks at, the model excepted, and what it makes of it.

``look_at_machine`` gathers; each ``check_...`` judges one thing, says what it found, and
where that is not as it should be, what to do. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from mtplx.backend import BLAS, BlasInfo, Device
from mtplx.config import Settings
from mtplx.errors import ConfigError

SHOWN_VERSIONS = ("mtplx", "mlx", "mlx-lm", "transformers", "huggingface-hub")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: What it is about.
        status: ``problem`` where serving will fail.
        found: What there is.
        fix: What to do, where something is to be done.
    """

    check: str
    status: Literal["ok", "warning", "problem"]
    found: str
    fix: str | None = None


@dataclass(frozen=True)
class Machine:
    """What the checks judge by.

    Attributes:
        total_bytes: Memory that the device may use.
        available_bytes: What can still be taken of it.
        physical_bytes: What is built in.
        compiler: The C++ compiler that MLX would call on the CPU.
        gpu: What MLX says about the GPU, empty where there is none.
        wired_limit_mb: macOS's limit for the GPU's memory, 0 where it is the default.
    """

    device: Device
    total_bytes: int
    available_bytes: int
    physical_bytes: int
    platform: str = sys.platform
    blas: BlasInfo = BLAS
    compiler: str | None = None
    gpu: dict[str, Any] = field(default_factory=dict)
    wired_limit_mb: int = 0


def look_at_machine(device: Literal["auto", "cpu", "gpu"]) -> Machine:
    """Gather what the checks need.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    import mlx.core as mx

    from mtplx.backend import available_memory_bytes, memory_bytes, resolve_device

    chosen = resolve_device(device)
    return Machine(
        device=chosen,
        total_bytes=memory_bytes(chosen),
        available_bytes=available_memory_bytes(),
        physical_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        compiler=shutil.which("g++"),
        gpu=dict(mx.device_info()) if mx.is_available(mx.gpu) else {},
        wired_limit_mb=_wired_limit_mb(),
    )


def check_machine(machine: Machine) -> Finding:
    """Say what this is."""
    from mtplx.prefill_bench import processor_name

    return Finding(
        "machine",
        "ok",
        f"{platform.platform()}, {processor_name()}, {os.cpu_count()} cores; "
        f"{gib(machine.total_bytes)} of memory for the {machine.device.upper()}, "
        f"{gib(machine.available_bytes)} free",
    )


def check_versions() -> Finding:
    """Compare what is installed with what this version of mtplx was made for."""
    found = [f"Python {platform.python_version()}"]
    for name in SHOWN_VERSIONS:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    wrong = _wrong_versions()
    if wrong:
        return Finding(
            "versions",
            "problem",
            f"{', '.join(found)}; {'; '.join(wrong.values())}",
            "Run `pip install -U " + " ".join(f"'{need}'" for need in wrong) + "`.",
        )
    return Finding("versions", "ok", ", ".join(found))


def _wrong_versions() -> dict[str, str]:
    """Return, by requirement, what is there instead."""
    try:
        needed = requires("mtplx") or []
    except PackageNotFoundError:
        return {}  # Run from a checkout.
    wrong = {}
    for text in needed:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            there = version(need.name)
        except PackageNotFoundError:
            wrong[f"{need.name}{need.specifier}"] = f"{need.name} is not installed"
            continue
        if not need.specifier.contains(there, prereleases=True):
            wrong[f"{need.name}{need.specifier}"] = (
                f"{need.name} {there} is not {need.specifier}"
            )
    return wrong


def check_device(machine: Machine) -> Iterator[Finding]:
    """Look at what computes."""
    if machine.gpu:
        name = machine.gpu.get("device_name") or machine.gpu.get("architecture") or "a GPU"
        limit = (
            f", wired limit {machine.wired_limit_mb} MB" if machine.wired_limit_mb else ""
        )
        yield Finding("gpu", "ok", f"{name}{limit}")
    elif machine.platform == "darwin":
        yield Finding(
            "gpu",
            "problem",
            "MLX sees no Metal GPU.",
            "Use a Python for arm64 (`arch` says what runs) on the Mac itself: a virtual "
            "machine may have no Metal.",
        )
    if machine.device == "gpu":
        return
    blas = machine.blas
    if blas.problem is None:
        yield Finding("blas", "ok", blas.description)
    else:
        yield Finding("blas", "problem", f"{blas.description}. {blas.problem}", blas.fix)
    if machine.compiler is not None:
        yield Finding("compiler", "ok", machine.compiler)
    else:
        yield Finding(
            "compiler",
            "warning",
            "There is no g++, so MLX computes without fused kernels on the CPU, which is "
            "slower.",
            "Install a C++ compiler: `apt install g++`, `dnf install gcc-c++` or "
            "`xcode-select --install`.",
        )


def check_disk(settings: Settings) -> Iterator[Finding]:
    """Look at the folder of `kv_disk`: rights, room, and every byte in it."""
    if settings.kv_disk is None:
        yield Finding("disk", "ok", "not used; `--kv-disk DIR` keeps state across restarts")
        return
    from mtplx.session.disk.audit import verify

    folder = Path(settings.kv_disk).expanduser()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        kind = "cannot be written to" if existing.is_dir() else "is no folder"
        yield Finding(
            "disk",
            "problem",
            f"{existing} {kind}.",
            f"Run `chmod u+rwx {existing}` if it is yours, or name another folder with "
            "--kv-disk.",
        )
        return
    free = shutil.disk_usage(existing).free
    if not (folder / "index.sqlite").exists():
        yield Finding("disk", "ok", f"{folder}, empty; {gib(free)} free on its disk")
        return
    if folder.stat().st_mode & 0o077:
        yield Finding(
            "disk",
            "warning",
            f"Other users may look into {folder}, and prompts can be read back from it.",
            f"Run `chmod 700 {folder}`.",
        )
    try:
        verdict = verify(folder)
    except ConfigError as error:
        # The format of another version.
        yield Finding("disk", "warning", str(error), "To keep it, name another folder.")
        return
    if verdict.bad:
        name, reason = verdict.bad[0]
        more = f", and {len(verdict.bad) - 1} more" if len(verdict.bad) > 1 else ""
        yield Finding(
            "disk",
            "problem",
            f"{folder} is damaged: {name}: {reason}{more}.",
            f"Run `{_cache('clear', folder)}` with no server on it; prompts are then read "
            "anew.",
        )
        return
    room = settings.kv_disk_bytes - verdict.nbytes
    if free < room:
        yield Finding(
            "disk",
            "warning",
            f"{folder} may grow by {gib(room)}, and its disk has {gib(free)} free.",
            f"Free some, or set --kv-disk-bytes to {verdict.nbytes + free // 2}.",
        )
        return
    yield Finding("disk", "ok", f"{folder}, {verdict.files} files whole, {gib(free)} free")


def check_port(settings: Settings) -> Finding:
    """Try to have the port, and give it back."""
    from mtplx.server.run import reserve

    try:
        with reserve(settings.host, settings.port):
            return Finding("port", "ok", f"{settings.host}, port {settings.port} is free")
    except ConfigError as error:
        if "taken" not in str(error):
            return Finding("port", "problem", str(error), "Change --host or --port.")
    with socket.create_server((settings.host, 0)) as probe:
        other = probe.getsockname()[1]
    return Finding(
        "port",
        "problem",
        f"Port {settings.port} on {settings.host} is taken.",
        f"Stop what listens there (`lsof -i :{settings.port}` says what), or serve with "
        f"`--port {other}`, which is free.",
    )


def _wired_limit_mb() -> int:
    if sys.platform != "darwin":
        return 0
    try:
        done = subprocess.run(
            ["sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True
        )
        return int(done.stdout)
    except (OSError, ValueError):
        return 0  # An older macOS, which has no such limit.


def _cache(command: str, folder: Path) -> str:
    return f"mtplx cache {command} --kv-disk {folder}"


def gib(nbytes: int) -> str:
    """Return bytes for humans."""
    return f"{nbytes / 1024**3:.2f} GiB"
