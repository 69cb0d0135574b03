"""Fetches models from the hub.

The hub's client keeps the files that an earlier attempt got, goes on where a connection
broke, and compares what arrived with what was announced; this file reports how far it is,
and asks first what can be known first: that mlx-lm can run the model, and that the disk
has room for it. Runs on the thread that loads.
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants, hf_hub_download, snapshot_download
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS
from tqdm.std import tqdm

from mtplx.errors import ModelLoadError
from mtplx.models.survey import check_supported, survey
from mtplx.types import Progress


def fetch(name: str, progress: Progress | None = None) -> Path:
    """Return the folder of a model of the hub, fetched now unless it was before.

    Raises:
        Exception: Any of those that the hub's client and what is below it have.
    """
    bar = None if progress is None else _bar(f"Downloading {name}", progress)
    return Path(
        snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, tqdm_class=bar)
    )


def pull(name: str, progress: Progress) -> Path:
    """As ``fetch``, having asked whether it can be run and stored, and look at the result.

    Raises:
        ModelLoadError: It cannot, or what arrived is not whole.
        Exception: As ``fetch``.
    """
    progress(f"Looking for {name}", None)
    config = json.loads(Path(hf_hub_download(name, "config.json")).read_text("utf-8"))
    fault = check_supported(config)
    if fault is not None:
        raise ModelLoadError(f"{fault.what}. {fault.fix}")
    files = snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS, dry_run=True)
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(p for p in (cache, *cache.parents) if p.exists())).free
    if missing > free:
        raise ModelLoadError(
            f"{name} needs {missing / 1e9:.1f} GB more on the disk of {cache}, and "
            f"{free / 1e9:.1f} GB are free. Remove something (`mtplx models` shows what "
            "there is), or set HF_HOME to a folder on another disk."
        )
    folder = fetch(name, progress)
    for fault in survey(folder).faults:
        raise ModelLoadError(f"{fault.what} {fault.fix}")
    return folder


def _bar(what: str, progress: Progress) -> type[tqdm]:
    """Return a progress bar that tells ``progress`` what it would draw."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["file"] = io.StringIO()
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> None:
            # There is one of files, and one or two of bytes, of which one may stand still.
            if self.unit == "B" and self.total and self.n:
                progress(what, min(self.n / self.total, 1.0))

    return Bar
