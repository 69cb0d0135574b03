"""Which model a name means."""

from __future__ import annotations

import pytest

from mtplx.errors import ConfigError, ModelNotFoundError
from mtplx.server.names import ModelNames

TWO = ("big", "small")


@pytest.mark.parametrize(
    ("name", "means"),
    [(None, "big"), ("big", "big"), ("small", "small"), ("tiny", "small")],
)
def test_a_name_an_alias_or_nothing(name: str | None, means: str) -> None:
    assert ModelNames.read(TWO, "tiny=small").resolve(name) == means


def test_the_longest_alias_counts() -> None:
    names = ModelNames.read(TWO, "claude-*=big, claude-haiku*=small,claude-haiku-0=big")
    told = ["claude-opus-4", "claude-haiku-4", "claude-haiku-0"]
    assert [names.resolve(name) for name in told] == ["big", "small", "big"]


@pytest.mark.parametrize("name", ["claude-opus-4", "gpt-5"])
def test_names_of_providers_mean_the_only_model(name: str) -> None:
    assert ModelNames.read(["big"], "").resolve(name) == "big"
    with pytest.raises(ModelNotFoundError):
        ModelNames.read(TWO, "").resolve(name)


@pytest.mark.parametrize("name", ["", "Big", "big ", "claude", "tiny*", "x" * 5000])
def test_unknown_ones_are_told_what_there_is(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        ModelNames.read(TWO, "tiny=small").resolve(name)
    assert caught.value.message.endswith("; use one of 'big', 'small'.")
    assert len(caught.value.message) < 300
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ("tiny", "write ALIAS=NAME"),
        ("=big", "write ALIAS=NAME"),
        ("tiny=", "write ALIAS=NAME"),
        ("tiny=none", "no model 'none'; use one of 'big', 'small'"),
        ("tiny=big,tiny=small", "'tiny', which has a meaning already"),
        ("big=small", "'big', which has a meaning already"),
    ],
)
def test_aliases_that_cannot_be_meant(aliases: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelNames.read(TWO, aliases)
