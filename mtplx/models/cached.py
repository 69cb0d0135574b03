"""The models that were fetched from the hub before.

Decides which of them can be run: those with weights, of an architecture that mlx-lm has.
Reads the cache only, and never asks the hub. Any thread.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import CacheNotFound, constants, scan_cache_dir
from mlx_lm.utils import _get_classes


def cached_models(cache: Path | None = None) -> dict[str, Path]:
    """Return the folders of the models in the hub's cache that can be run, by id.

    Args:
        cache: The cache; None takes the one that ``HF_HOME`` and ``HF_HUB_CACHE`` name.
    """
    try:
        repositories = scan_cache_dir(cache or constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    found: dict[str, Path] = {}
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(
            repository.revisions, key=lambda each: ("main" in each.refs, each.last_modified)
        )
        if _can_run(newest.snapshot_path):
            found[repository.repo_id] = newest.snapshot_path
    return found


def _can_run(folder: Path) -> bool:
    try:
        _get_classes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # No model, or none for mlx-lm.
    return any(folder.glob("model*.safetensors"))
