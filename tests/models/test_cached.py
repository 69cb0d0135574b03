"""Which models of the hub's cache can be run."""

from __future__ import annotations

import json

import pytest

from mtplx.models.cached import cached_models

LLAMA = {"model_type": "llama"}


def fetched(cache, name, config=LLAMA, *, kind="models", revision="0" * 40, weights=True):
    """Put a repository into the cache as the hub's client does, and return its folder."""
    repository = cache / f"{kind}--{name.replace('/', '--')}"
    folder = repository / "snapshots" / revision
    folder.mkdir(parents=True)
    (repository / "refs").mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_those_that_can_run(tmp_path):
    folders = {
        "org/one": fetched(tmp_path, "org/one"),
        "org/two": fetched(tmp_path, "org/two", {"model_type": "mistral"}),
    }
    fetched(tmp_path, "org/image", {"model_type": "vit"})
    fetched(tmp_path, "org/odd", {"model_type": 5})
    fetched(tmp_path, "org/list", [])
    fetched(tmp_path, "org/nothing", None)
    fetched(tmp_path, "org/half", weights=False)
    fetched(tmp_path, "org/data", kind="datasets")
    assert cached_models(tmp_path) == folders


def test_the_revision_that_main_means(tmp_path):
    for revision in ("1" * 40, "2" * 40, "3" * 40):
        fetched(tmp_path, "org/one", revision=revision)
    refs = tmp_path / "models--org--one" / "refs"
    (refs / "main").write_text("2" * 40)
    assert cached_models(tmp_path)["org/one"].name == "2" * 40


@pytest.mark.parametrize("exists", [False, True])
def test_no_cache_or_an_empty_one(tmp_path, exists):
    folder = tmp_path / "hub"
    if exists:
        folder.mkdir()
    assert cached_models(folder) == {}
