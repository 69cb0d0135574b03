"""Which model a name means: its own, the one it was asked for by, an alias, or none.

Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mtplx.errors import ConfigError, ModelNotFoundError

# What clients that cannot be told a name send. Nothing is guessed where it could mean
# one of several models.
_FOREIGN = ("claude-*", "gpt-*")


@dataclass(frozen=True)
class ModelNames:
    """The names that clients may use.

    Attributes:
        served: The models, the first one first.
        aliases: Other names, each with the model it means. One that ends in ``*`` stands
            for all that begin so; the longest one counts.
    """

    served: tuple[str, ...]
    aliases: Mapping[str, str]

    @classmethod
    def read(
        cls,
        served: Sequence[str],
        aliases: str,
        arguments: Mapping[str, str] | None = None,
    ) -> ModelNames:
        """Return the names for these models and the setting ``aliases``.

        Args:
            served: The models, the first one first.
            aliases: The setting.
            arguments: By model, what it was asked for by: ``demo``, a folder, a hub id.

        Raises:
            ConfigError: An alias is not ALIAS=NAME, is there twice or the name of a
                model, or means none.
        """
        first, *others = served
        named: dict[str, str] = {}
        for entry in filter(None, (entry.strip() for entry in aliases.split(","))):
            alias, _, name = (word.strip() for word in entry.partition("="))
            if not alias or not name:
                raise ConfigError(f"`aliases` has {entry!r}; write ALIAS=NAME.")
            if alias in named or alias in served:
                raise ConfigError(f"`aliases` has {alias!r}, which has a meaning already.")
            if name not in served:
                raise ConfigError(
                    f"`aliases` has {entry!r}, and there is no model {name!r}; "
                    f"{_choice(served)}."
                )
            named[alias] = name
        foreign = {} if others else dict.fromkeys(_FOREIGN, first)
        typed = _typed_names(served, arguments or {})
        return cls(tuple(served), foreign | typed | named)

    def resolve(self, name: str | None) -> str:
        """Return the model that ``name`` means; an absent one means the first.

        Raises:
            ModelNotFoundError: None; the message says which there are.
        """
        if name is None:
            return self.served[0]
        if name in self.served:
            return name
        fitting = [alias for alias in self.aliases if _fits(name, alias)]
        if fitting:
            return self.aliases[max(fitting, key=len)]
        raise ModelNotFoundError(
            f"The model {name[:200]!r} is not served here; {_choice(self.served)}.",
            param="model",
        )


def _typed_names(served: Sequence[str], arguments: Mapping[str, str]) -> dict[str, str]:
    """Return what people call models who read the command that started the server: the
    argument as it is, the folder's name, the hub id without its owner."""
    meanings: dict[str, set[str]] = {}
    for name in served:
        argument = arguments.get(name, name)
        for word in (argument, PurePath(argument).name, PurePath(name).name):
            meanings.setdefault(word, set()).add(name)
    first = served[0]
    # What stands right after `mtplx serve` can mean nothing else.
    meanings[arguments.get(first, first)] = {first}
    return {
        word: next(iter(models))
        for word, models in meanings.items()
        if word and word not in served and len(models) == 1
    }


def _fits(name: str, alias: str) -> bool:
    return name == alias or (alias.endswith("*") and name.startswith(alias[:-1]))


def _choice(names: Sequence[str]) -> str:
    first, *others = map(repr, names)
    return f"use one of {', '.join([first, *others])}" if others else f"use {first}"
