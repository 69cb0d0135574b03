"""The models on this machine: fetched from the hub, or converted before.

Decides which of the hub's can be run: those with weights, of an architecture that mlx-lm
has. Reads caches only, and never asks the hub. Any thread.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CachedRepoInfo, CacheNotFound, constants, scan_cache_dir
from mlx_lm.utils import _get_classes

from mtplx.config import cache_folder
from mtplx.errors import ConfigError
from mtplx.models import demo
from mtplx.models.gguf import converted_path


@dataclass(frozen=True)
class LocalModel:
    """A model in a cache.

    Attributes:
        name: What to write after `mtplx serve`.
        path: Its folder.
        origin: ``hub`` or ``converted``.
    """

    name: str
    path: Path
    origin: str


def cached_models(cache: Path | None = None) -> dict[str, Path]:
    """Return the folders of the models in the hub's cache that can be run, by id.

    Args:
        cache: The cache; None takes the one that ``HF_HOME`` and ``HF_HUB_CACHE`` name.
    """
    return {
        repository.repo_id: folder
        for repository in _repositories(cache)
        if (folder := _newest(repository)) is not None and _can_run(folder)
    }


def local_models() -> list[LocalModel]:
    """Return the models in the hub's cache and those that were converted here, broken
    ones included."""
    found = [
        LocalModel(repository.repo_id, folder, "hub")
        for repository in _repositories(None)
        if (folder := _newest(repository)) is not None and (folder / "config.json").exists()
    ]
    converted = cache_folder() / "converted"
    folders = sorted(converted.iterdir()) if converted.is_dir() else []
    for folder in folders:
        name = "demo" if folder == demo.folder() else str(folder)
        found.append(LocalModel(name, folder, "converted"))
    return found


def find_local(name: str) -> Path | None:
    """Return the folder that `mtplx serve NAME` would load, or None where the model is
    still to be fetched or converted."""
    if name == "demo":
        return demo.folder() if demo.folder().exists() else None
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        converted = converted_path(path)
        return converted if converted.exists() else None
    fetched = {model.name: model.path for model in local_models()}
    return fetched.get(name)


def find_cached(name: str) -> LocalModel:
    """Return the model of ``local_models`` that is called so.

    Raises:
        ConfigError: There is none.
    """
    for model in local_models():
        if name in (model.name, model.path.name):
            return model
    raise ConfigError(
        f"{name!r} is in no cache. `mtplx models` lists those that are; other folders are "
        "yours to remove."
    )


def remove_model(model: LocalModel) -> int:
    """Remove a model from its cache, in all its revisions, and return the bytes that are
    free now.

    Raises:
        ConfigError: It cannot be removed.
    """
    try:
        if model.origin == "converted":
            nbytes = sum(f.stat().st_size for f in model.path.rglob("*") if f.is_file())
            shutil.rmtree(model.path)
            return nbytes
        (repository,) = (r for r in _repositories(None) if r.repo_id == model.name)
        shutil.rmtree(repository.repo_path)
        return repository.size_on_disk
    except OSError as error:
        raise ConfigError(f"{model.path} cannot be removed: {error.strerror}.") from None


def _repositories(cache: Path | None) -> list[CachedRepoInfo]:
    try:
        found = scan_cache_dir(cache or constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = [each for each in found if each.repo_type == "model"]
    return sorted(models, key=lambda each: each.repo_id)


def _newest(repository: CachedRepoInfo) -> Path | None:
    newest = max(
        repository.revisions,
        key=lambda each: ("main" in each.refs, each.last_modified),
        default=None,
    )
    return None if newest is None else newest.snapshot_path


def _can_run(folder: Path) -> bool:
    try:
        _get_classes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # No model, or none for mlx-lm.
    return any(folder.glob("model*.safetensors"))
