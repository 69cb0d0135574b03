"""Puts a part into somebody else's configuration file.

What is there stays: keys are merged, entries of a list are matched by their name, and the
libraries for TOML and YAML keep comments and order. JSON with comments cannot be kept so
and is left alone. Before a file changes a copy of it is made beside it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Mapping, MutableMapping, MutableSequence
from pathlib import Path
from typing import Any

import tomlkit
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from tomlkit.exceptions import TOMLKitError

from mtplx.errors import ConfigError

_IDENTITY = ("name", "model_id", "id")
"""What tells the entries of a list apart."""


def render(path: Path, content: Any) -> str:
    """Return ``content`` in the format of ``path``."""
    if path.suffix == ".json":
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    if path.suffix == ".toml":
        return tomlkit.dumps(content)
    out = io.StringIO()
    _yaml().dump(content, out)
    return out.getvalue()


def merged(path: Path, content: Any, head: Mapping[str, Any]) -> str:
    """Return the file's text with ``content`` merged into it, and where it lacks them the
    keys of ``head``.

    Raises:
        ConfigError: It cannot be read, or holds something that cannot be merged with.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return render(path, _whole(content, head))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Nothing was changed.") from None
    there = _parse(path, text)
    if there is None:
        return render(path, _whole(content, head))
    if isinstance(there, list) != isinstance(content, list):
        raise ConfigError(f"{path} holds something else. Add what is shown by hand.")
    _merge(there, content)
    for key, value in head.items():
        there.setdefault(key, value)
    return render(path, there)


def write(path: Path, text: str) -> Path | None:
    """Write a file and return the copy of what was there before, if there was anything.

    Raises:
        ConfigError: It cannot be written; it is then as it was.
    """
    target = path.resolve()  # Dotfiles are often links into a repository.
    partial = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        backup = _back_up(target) if target.exists() else None
        # Keys are in there: nobody else may read a file that is new.
        mode = target.stat().st_mode & 0o777 if backup else 0o600
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as out:
            out.write(text)
        partial.chmod(mode)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
    return backup


def _back_up(path: Path) -> Path:
    """Copy a file beside itself, under a name that is free."""
    number = 1
    while (backup := path.with_name(f"{path.name}.bak{number}")).exists():
        number += 1
    shutil.copy2(path, backup)
    return backup


def _parse(path: Path, text: str) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(text) if text.strip() else None
        if path.suffix == ".toml":
            return tomlkit.parse(text)
        return _yaml().load(text)
    except (ValueError, YAMLError, TOMLKitError) as error:
        reason = str(error).partition("\n")[0]
        hint = " Are there comments in it?" if path.suffix == ".json" else ""
        raise ConfigError(
            f"{path} cannot be parsed ({reason}), so it was left alone.{hint} Add what is "
            "shown by hand."
        ) from None


def _merge(there: Any, new: Any) -> None:
    if isinstance(new, list):
        for item in new:
            twin = _twin(there, item)
            if twin is None:
                there.append(item)
            else:
                _merge(twin, item)
        return
    for key, value in new.items():
        old = there.get(key)
        mappings = isinstance(old, MutableMapping) and isinstance(value, dict)
        lists = isinstance(old, MutableSequence) and _identified(value)
        if mappings or lists:
            _merge(old, value)
        else:
            there[key] = value


def _whole(content: Any, head: Mapping[str, Any]) -> Any:
    return {**head, **content} if head else content


def _identified(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _twin(items: Any, new: Any) -> Any:
    for name in _IDENTITY:
        if name in new:
            same = (i for i in items if isinstance(i, dict) and i.get(name) == new[name])
            return next(same, None)
    return None


def _yaml() -> YAML:
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096  # Long values stay on their line.
    return yaml
