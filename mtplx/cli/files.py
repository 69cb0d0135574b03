"""What commands write to files that the user names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtplx.errors import ConfigError


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from None
