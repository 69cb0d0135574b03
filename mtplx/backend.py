"""Decides which library multiplies matrices, and on which device MLX computes.

MLX's CPU wheel for Linux links the reference BLAS. Symbols that are already global
when ``mlx.core`` is loaded win over those of its own library, so importing this module
loads OpenBLAS first; that is why ``mtplx/__init__.py`` imports it before anything else,
and why it imports nothing of MLX itself until a device is asked for. On macOS MLX uses
Accelerate, and there is nothing to do. The import runs on the importing thread;
``BLAS`` is constant from then on.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtplx.errors import ConfigError

Device = Literal["cpu", "gpu"]

_logger = logging.getLogger(__name__)

_PRICE = "float32 matrix products on the CPU will be about 80 times slower"


@dataclass(frozen=True)
class BlasInfo:
    """The library behind MLX's matrix products on the CPU.

    Attributes:
        description: For humans, ``OpenBLAS (/usr/lib/.../libopenblas.so.0)`` say.
        problem: Why OpenBLAS is not used and what that costs, else None.
        fix: What to do about it.
    """

    description: str
    problem: str | None = None
    fix: str | None = None

    @property
    def warning(self) -> str | None:
        """Problem and fix in one, or None."""
        return self.problem and f"{self.problem} {self.fix}"


def prepare_blas(
    *,
    platform: str,
    mlx_loaded: bool,
    candidates: Sequence[str],
    load: Callable[[str], None],
    find: Callable[[], str | None],
) -> BlasInfo:
    """Make an OpenBLAS the one that MLX will bind to.

    Args:
        platform: As ``sys.platform`` says.
        mlx_loaded: MLX is imported already, so it is too late to load anything.
        candidates: Libraries to try, best first.
        load: Loads one with global symbols, or raises ``OSError``.
        find: Names the library that globally provides ``cblas_sgemm``, or None.
    """
    if platform == "darwin":
        return BlasInfo("Accelerate")
    provider = find()
    if provider is not None and "openblas" in provider:
        return BlasInfo(f"OpenBLAS ({provider})")
    if mlx_loaded:
        return BlasInfo(
            "MLX's own BLAS",
            f"mlx was imported before mtplx, too early for OpenBLAS: {_PRICE}.",
            "Import mtplx first.",
        )
    reasons = []
    for candidate in candidates:
        try:
            load(candidate)
        except OSError as error:
            reasons.append(str(error))
        else:
            return BlasInfo(f"OpenBLAS ({find() or candidate})")
    return BlasInfo(
        "MLX's own BLAS",
        f"OpenBLAS was not found ({'; '.join(reasons)}): {_PRICE}.",
        "Run `pip install cmeel-openblas`, or install your system's OpenBLAS package.",
    )


def global_sgemm_library() -> str | None:
    """Return the path of the library that provides ``cblas_sgemm`` to this process.

    Only what is loaded with global symbols counts: it is what a library loaded later
    binds to.
    """
    process = ctypes.CDLL(None)
    try:
        symbol = ctypes.cast(process.cblas_sgemm, ctypes.c_void_p)
    except AttributeError:
        return None

    class DlInfo(ctypes.Structure):
        _fields_ = (
            ("file_name", ctypes.c_char_p),
            ("base", ctypes.c_void_p),
            ("symbol_name", ctypes.c_char_p),
            ("symbol", ctypes.c_void_p),
        )

    info = DlInfo()
    found = process.dladdr(symbol, ctypes.byref(info))
    return os.fsdecode(info.file_name) if found and info.file_name else None


def load_openblas(path: str) -> None:
    """Load an OpenBLAS with global symbols.

    The library on PyPI needs ``libgfortran.so.5``, which many machines lack; the copy
    inside MLX's CPU wheel then takes its place.

    Raises:
        OSError: The library or something that it needs is missing.
    """
    # Its idle threads otherwise spin for tens of milliseconds before they sleep, and take
    # the core from whoever has work: with one other busy process on two cores a prefill
    # took 3 to 5 s instead of 0.6 s. Alone it is no slower. Read when the library loads.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if "libgfortran" not in str(error):
            raise
        bundled = _distribution_path("mlx-cpu", "mlx_cpu.libs")
        if bundled is None or not _load_bundled_gfortran(bundled):
            raise
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _load_bundled_gfortran(folder: Path) -> bool:
    """Load the Fortran runtime from a wheel's folder under its usual name.

    Wheels carry it as ``libgfortran-<hash>.so.5``, a name no other library asks for. The
    loader goes by the name inside the file, so a copy in memory is given the usual one.
    """
    library = next(folder.glob("libgfortran-*.so.5*"), None)
    if library is None:
        return False
    usual_name, bundled_name = b"libgfortran.so.5\0", os.fsencode(library.name) + b"\0"
    content = library.read_bytes()
    if content.count(bundled_name) != 1 or len(bundled_name) < len(usual_name):
        return False
    padded_name = usual_name.ljust(len(bundled_name), b"\0")
    # It needs this one by its hashed name, which cannot be found from a copy in memory.
    for needed in folder.glob("libquadmath-*.so*"):
        ctypes.CDLL(str(needed))
    with os.fdopen(os.memfd_create("libgfortran.so.5"), "wb") as file:
        file.write(content.replace(bundled_name, padded_name))
        file.flush()
        ctypes.CDLL(f"/proc/self/fd/{file.fileno()}")
    return True


def _distribution_path(distribution: str, relative: str) -> Path | None:
    try:
        located = importlib.metadata.distribution(distribution).locate_file(relative)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(located))
    return path if path.exists() else None


def _openblas_candidates() -> list[str]:
    packaged = _distribution_path("cmeel-openblas", "cmeel.prefix/lib/libopenblas.so")
    return [*([str(packaged)] if packaged else []), "libopenblas.so.0"]


BLAS = prepare_blas(
    platform=sys.platform,
    mlx_loaded="mlx.core" in sys.modules,
    candidates=_openblas_candidates(),
    load=load_openblas,
    find=global_sgemm_library,
)
"""What this process uses."""


def resolve_device(
    wanted: Literal["auto", "cpu", "gpu"], *, has_gpu: bool | None = None
) -> Device:
    """Return the device to compute on; ``auto`` is the GPU where there is one.

    Args:
        wanted: What the user asked for.
        has_gpu: Replaces asking MLX.

    Raises:
        ConfigError: A GPU is asked for and MLX has none.
    """
    if has_gpu is None:
        import mlx.core as mx

        has_gpu = mx.is_available(mx.gpu)
    if wanted == "gpu" and not has_gpu:
        raise ConfigError(
            "MLX sees no GPU here. Use device `auto` or `cpu`, or install an MLX that "
            "supports your GPU."
        )
    if wanted == "auto":
        return "gpu" if has_gpu else "cpu"
    return wanted


def use_device(device: Device) -> None:
    """Make this the device that MLX computes on, in every thread.

    Warns once where the CPU will be slow for want of OpenBLAS.
    """
    import mlx.core as mx

    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
    if device == "cpu" and BLAS.warning:
        _warn_once(BLAS.warning)


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def compute_description(device: Device) -> str:
    """Name what computes, for ``ModelInfo.backend``."""
    return BLAS.description if device == "cpu" else "MLX on the GPU"


def memory_bytes(device: Device) -> int:
    """Return the memory that computing on ``device`` may use at most, in bytes."""
    if device == "gpu":
        import mlx.core as mx

        info = mx.device_info()
        for name in ("max_recommended_working_set_size", "memory_size", "total_memory"):
            if value := int(info.get(name, 0)):
                return value
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total  # Not Linux, or no limit is set.


def available_memory_bytes() -> int:
    """Return the memory this process can still take without swapping, in bytes."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [total]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text())
        limits.append(int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError):
        pass  # Not Linux, or no limit is set: what was read so far stands.
    return max(min(limits), 0)
