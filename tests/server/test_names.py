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


@pytest.mark.parametrize(
    ("served", "argument", "names"),
    [
        ("SmolLM2-135M-Instruct", "demo", ["demo"]),
        ("org/small", "org/small", ["small"]),
        ("small", "./models/small/", ["./models/small/"]),
        ("small", "~/latest", ["~/latest", "latest"]),
        ("small", "/m/small.gguf", ["/m/small.gguf", "small.gguf"]),
        ("org/small", "/hub/models--org--small/snapshots/0a", ["0a", "small"]),
    ],
)
def test_what_stands_after_serve_means_the_model(
    served: str, argument: str, names: list[str]
) -> None:
    read = ModelNames.read([served, "other"], "", {served: argument})
    assert [read.resolve(name) for name in [*names, served]] == [served] * (len(names) + 1)
    with pytest.raises(ModelNotFoundError):
        read.resolve("someone/small")


def test_a_short_name_of_two_models_means_none() -> None:
    served = ["one/small", "two/small", "tuned"]
    read = ModelNames.read(served, "", {"tuned": "two/big"})
    assert [read.resolve(name) for name in ("big", "two/big")] == ["tuned", "tuned"]
    with pytest.raises(ModelNotFoundError):
        read.resolve("small")


def test_the_first_argument_and_aliases_win() -> None:
    arguments = {"Smol": "demo", "tuned": "demo"}
    names = ModelNames.read(["Smol", "tuned", "org/x"], "x=tuned", arguments)
    assert [names.resolve(name) for name in ("demo", "x")] == ["Smol", "tuned"]


def test_a_model_that_is_called_like_an_argument_keeps_its_name() -> None:
    names = ModelNames.read(["Smol", "demo"], "", {"Smol": "demo", "demo": "org/x"})
    assert names.resolve("demo") == "demo"
