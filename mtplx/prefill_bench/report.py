"""What stands around the figures so that they can be repeated and compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtplx import __version__
from mtplx.errors import ConfigError
from mtplx.types import ModelInfo


@dataclass(frozen=True)
class Comparison:
    """The same row in two reports; a ratio above 1 is better, None is unknown.

    Attributes:
        case, mode: Of the row.
        before, after: Names of what was measured.
        tok_s_ratio: Rate after over rate before.
        ttft_ratio: TTFT before over TTFT after.
        gap_ratio: Worst gap before over worst gap after.
    """

    case: str
    mode: str
    before: str
    after: str
    tok_s_ratio: float | None
    ttft_ratio: float | None
    gap_ratio: float | None


def machine() -> dict[str, Any]:
    """Describe the machine and the versions."""
    return {
        "machine": {
            "system": platform.platform(),
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        },
        "versions": {
            "python": platform.python_version(),
            "mtplx": __version__,
            **{name: version(name) for name in ("mlx", "mlx-lm")},
        },
    }


def model_facts(info: ModelInfo) -> dict[str, Any]:
    """Describe a model of ours."""
    return asdict(info)


def conditions(info: ModelInfo, **settings: Any) -> dict[str, Any]:
    """Describe machine, versions, a model of ours and settings."""
    told = machine()
    told["machine"] |= {"device": info.device, "backend": info.backend}
    return {**told, "model": model_facts(info), "settings": settings}


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Comparison]:
    """Set the rows of two reports side by side.

    Where each has one subject these are compared; else those of the same name.

    Raises:
        ConfigError: One of them is no report, or they have nothing in common.
    """
    pairs = list(_pairs(_subjects(before), _subjects(after)))
    found = [
        Comparison(
            case=row["case"],
            mode=row["mode"],
            before=first["name"],
            after=second["name"],
            tok_s_ratio=_ratio(other["prefill_tok_s"], row["prefill_tok_s"]),
            ttft_ratio=_ratio(row["ttft_s"], other["ttft_s"]),
            gap_ratio=_ratio(row["worst_gap_s"], other["worst_gap_s"]),
        )
        for first, second in pairs
        for row in first["rows"]
        for other in second["rows"]
        if (row["case"], row["mode"]) == (other["case"], other["mode"])
    ]
    if not found:
        raise ConfigError(
            "The two reports have no case in common. Measure both with the same --cases "
            "and --modes."
        )
    return found


def processor_name() -> str:
    """Return what the CPU is called."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()


def _subjects(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    try:
        return [{"name": each["name"], "rows": each["rows"]} for each in report["subjects"]]
    except (KeyError, TypeError):
        raise ConfigError(
            "That is no report of `mtplx prefill-bench --json`; measure again."
        ) from None


def _pairs(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    if len(before) == len(after) == 1:
        yield before[0], after[0]
        return
    named = {each["name"]: each for each in after}
    yield from ((each, named[each["name"]]) for each in before if each["name"] in named)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
