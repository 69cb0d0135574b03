"""What `also` and `cached_models` mean."""

from __future__ import annotations

import pytest

from mtplx.cli.loading import load_model, other_models
from mtplx.config import Settings
from mtplx.errors import ConfigError
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved


def sources(**settings):
    """Return name -> (model, adapter)."""
    others = other_models(Settings(**settings))
    return {name: (one.model, one.adapter) for name, one in others.items()}


def test_models_with_and_without_adapters():
    also = "fast=org/small, tuned = ~/base + ~/lora ,twin=demo"
    assert sources(also=also, model="org/big", adapter="mine") == {
        "fast": ("org/small", None),
        "tuned": ("~/base", "~/lora"),
        "twin": ("demo", None),
    }
    assert sources() == {}


def test_all_else_is_as_for_the_first_one():
    settings = Settings(also="fast=org/small", dtype="float16", port=1234)
    [fast] = other_models(settings).values()
    assert fast == settings.model_copy(update={"model": "org/small"})


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("org/small", "write NAME=MODEL or NAME=MODEL"),
        ("=org/small", "write NAME=MODEL"),
        ("fast=", "write NAME=MODEL"),
        ("fast=org/small+", "write NAME=MODEL"),
        ("fast=a,fast=b", "two models called 'fast'"),
    ],
)
def test_what_cannot_be_meant(also, said):
    with pytest.raises(ConfigError, match=said):
        sources(also=also)


def test_others_need_a_place():
    with pytest.raises(ConfigError, match="at least 2"):
        sources(also="fast=org/small", max_models=1)


def test_models_of_the_cache_are_loaded_from_there(tmp_path, monkeypatch):
    folder = tmp_path / "models--org--tiny" / "snapshots" / ("0" * 40)
    folder.parent.mkdir(parents=True)
    saved(folder, tiny_llama())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert sources(model="org/big") == {}
    told = sources(model="org/big", cached_models=True, also="fast=org/small")
    assert told == {"fast": ("org/small", None), "org/tiny": (str(folder), None)}
    assert sources(model="org/tiny", cached_models=True) == {}
    [one] = other_models(Settings(cached_models=True, model="x")).values()
    assert load_model(one, lambda what, fraction: None).vocab_size > 0
