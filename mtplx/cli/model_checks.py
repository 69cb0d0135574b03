"""What `mtplx doctor` makes of the model: its files, and the memory it will take.

Nothing is fetched or loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mtplx.cli.checks import Finding, Machine, gib
from mtplx.config import Settings
from mtplx.engine.memory import LEAST_BYTES, SHARE, room_bytes
from mtplx.errors import ModelLoadError
from mtplx.models.cached import find_local
from mtplx.models.survey import Survey, loaded_weight, survey

FEW_TOKENS = 4096
"""A conversation with less room than this soon stops."""


def check_named_model(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Look at the model that the settings name."""
    try:
        folder = find_local(settings.model)
    except ModelLoadError as error:
        yield Finding("model", "problem", str(error), "Name another file.")
        return
    if folder is None:
        yield _missing_model(settings.model)
        return
    found = survey(folder)
    yield from check_files(found)
    if found.network is not None:
        yield check_memory(found, settings, machine)


def check_files(found: Survey) -> Iterator[Finding]:
    """Look at the model's files."""
    for fault in found.faults:
        yield Finding("model", "problem", fault.what, fault.fix)
    if not found.faults and found.network is not None:
        kinds = ", ".join(f"{n} {kind}" for kind, n in found.network.cache_kinds.items())
        yield Finding(
            "model",
            "ok",
            f"{found.path}, {gib(found.nbytes)}, context {found.network.context_length}, "
            f"caches {kinds}",
        )


def check_memory(found: Survey, settings: Settings, machine: Machine) -> Finding:
    """Compare what the model will take with what there is, as loading it would."""
    weight = loaded_weight(
        found,
        settings.dtype,
        device=machine.device,
        available_bytes=machine.available_bytes,
    )
    room = room_bytes(
        total=machine.total_bytes,
        available=machine.available_bytes - weight.weight_bytes,
        weights=weight.weight_bytes,
    )
    told = (
        f"weights {gib(weight.weight_bytes)} as {weight.dtype}, "
        f"{gib(machine.available_bytes)} of {gib(machine.total_bytes)} free"
    )
    if room < LEAST_BYTES:
        return Finding(
            "memory",
            "problem",
            f"The model does not fit: {told}.",
            _memory_fix(found, weight.weight_bytes, machine),
        )
    if weight.warning is not None:
        return Finding("memory", "warning", weight.warning, "Choose a smaller model.")
    if not weight.row_bytes:
        return Finding("memory", "ok", f"{told}, {gib(room)} for KV state")
    tokens = room // weight.row_bytes
    told += f", {gib(room)} for KV state: {tokens:,} tokens"
    if tokens < FEW_TOKENS:
        return Finding(
            "memory",
            "warning",
            f"There is little room for prompts: {told}.",
            "Close other programs, or choose a smaller model.",
        )
    return Finding("memory", "ok", told)


def _memory_fix(found: Survey, weights: int, machine: Machine) -> str:
    total, free = machine.total_bytes, machine.available_bytes
    stored = found.stored_bytes
    if weights > stored and stored + LEAST_BYTES < SHARE * min(total, free):
        return "Serve it as it is stored, with `--dtype model`, or choose a smaller model."
    if weights + LEAST_BYTES <= SHARE * total:
        needed = weights + int(LEAST_BYTES / SHARE)
        return (
            f"Close other programs: {gib(needed)} must be free. Or choose a smaller model."
        )
    wired = int((weights + LEAST_BYTES) / SHARE) + 2**20
    metal = machine.platform == "darwin" and machine.device == "gpu"
    if metal and wired < SHARE * machine.physical_bytes:
        return (
            f"Let the GPU use more: `sudo sysctl iogpu.wired_limit_mb={wired // 2**20}` "
            "(until the next restart)."
        )
    return (
        "Choose a model with fewer parameters or a stronger quantization: up to "
        f"{gib(int(SHARE * total) - LEAST_BYTES)} of weights fit here."
    )


def _missing_model(name: str) -> Finding:
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            return Finding(
                "model",
                "problem",
                f"{path} is a file.",
                "Name its folder, or a .gguf file.",
            )
        return Finding("model", "ok", f"{path}, to be converted at the first start")
    if name == "demo" or (name.count("/") == 1 and not name.startswith((".", "~", os.sep))):
        return Finding(
            "model",
            "warning",
            f"{name} is not on this machine; the first start fetches it.",
            f"Run `mtplx models pull {name}` to have it fetched before.",
        )
    return Finding(
        "model",
        "problem",
        f"There is no model at {name!r}.",
        "Name a folder with config.json, a .gguf file, a hub id (owner/model), or `demo`.",
    )
