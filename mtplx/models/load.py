"""Loads a network and its tokenizer by name.

Decides what a name means (the word ``demo``, a folder, a GGUF file, a hub id) and turns
every way that can fail into one ``ModelLoadError`` that says what to do. Reading folders
is mlx-lm's work; the type of the parameters is decided in ``precision.py``. Everything is
evaluated on return, so that any one thread may own the network from then on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from mtplx.backend import Device, available_memory_bytes, use_device
from mtplx.errors import ModelLoadError
from mtplx.models import demo
from mtplx.models.gguf import fetch_converted
from mtplx.models.hub import fetch
from mtplx.models.precision import (
    Precision,
    apply_precision,
    float32_bytes,
    parameter_dtype,
    plan_precision,
)
from mtplx.types import Progress


@dataclass(frozen=True)
class LoadedNetwork:
    """A network ready to run.

    Attributes:
        network: Called as ``network(token_ids[1, n], cache=layers)``.
        tokenizer: mlx-lm's wrapper.
        config: The model's configuration.
        name: What clients call it.
        path: Folder it was read from.
        dtype: Type of most floating parameters, ``float32`` say.
        notes: What was changed after reading, for humans.
    """

    network: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    name: str
    path: Path
    dtype: str
    notes: tuple[str, ...] = ()


def load_network(
    name: str,
    *,
    device: Device,
    dtype: Precision,
    adapter: str | None = None,
    progress: Progress | None = None,
) -> LoadedNetwork:
    """Load a model for one device.

    Args:
        name: ``demo``, a folder with ``config.json``, a ``.gguf`` file, or a hub id.
        device: Where it will run; becomes MLX's default.
        dtype: ``auto`` is float32 on the CPU where that fits, else as stored.
        adapter: Folder of an adapter that mlx-lm trained.
        progress: Told what is being done.

    Raises:
        ModelLoadError: The model, its tokenizer or the adapter cannot be had.
    """
    use_device(device)
    served_name, path = find_model(name, progress)
    if progress is not None:
        progress(f"Loading {served_name}", None)
    network, config = _read_network(path)
    notes = []
    if adapter is not None:
        network = _with_adapter(network, adapter)
        notes.append(f"adapter {adapter}")
    tokenizer = _read_tokenizer(path, config)
    plan = plan_precision(
        dtype,
        device=device,
        float32_bytes=float32_bytes(network),
        available_bytes=available_memory_bytes(),
    )
    network, changed = apply_precision(network, plan)
    if changed is not None:
        notes.append(changed)
    network.eval()
    try:
        mx.eval(list(_arrays(network)))
    except RuntimeError as error:
        raise ModelLoadError(
            f"The model in {path} cannot be brought into memory: {_first_line(error)}. "
            "Use a smaller one, or dtype `model`."
        ) from error
    return LoadedNetwork(
        network,
        tokenizer,
        config,
        served_name,
        path,
        parameter_dtype(network),
        tuple(notes),
    )


def find_model(name: str, progress: Progress | None = None) -> tuple[str, Path]:
    """Return what clients call the model, and its folder, fetched if need be.

    Raises:
        ModelLoadError: Nothing has this name, or it cannot be fetched.
    """
    if name == "demo":
        return demo.NAME, demo.fetch_demo(progress)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _folder_name(path.resolve()), path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(f"{path} is a file. Name its folder, or a .gguf file.")
        return path.stem, fetch_converted(path, progress)
    looks_like_path = name.startswith((os.sep, ".", "~")) or path.suffix.lower() == ".gguf"
    if looks_like_path or not name or name.count("/") > 1:
        raise ModelLoadError(
            f"There is no model at {str(path)!r}. Name a folder with config.json, a .gguf "
            "file, a hub id (owner/model), or `demo`."
        )
    try:
        return name, fetch(name, progress)
    # Everything between here and the hub may fail, each library with errors of its own.
    except Exception as error:
        raise hub_error(name, error) from error


def hub_error(name: str, error: Exception) -> ModelLoadError:
    """Return what to tell a user whose model could not be fetched."""
    return ModelLoadError(
        f"{name!r} is no folder here, and it cannot be fetched from the hub "
        f"({_first_line(error)}). Check the spelling; if access is restricted, log in "
        "with `hf auth login`; offline, name a model folder, or try `demo`."
    )


def _folder_name(folder: Path) -> str:
    """Return the hub id of a folder in the hub's cache, else the folder's own name."""
    kind, *owner_and_name = folder.parent.parent.name.split("--")
    if folder.parent.name == "snapshots" and kind == "models" and owner_and_name:
        return "/".join(owner_and_name)
    return folder.name


def _read_network(path: Path) -> tuple[nn.Module, dict[str, Any]]:
    try:
        declared = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(
            f"{path} has no config.json, so it is no model folder. Name the one that has."
        ) from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path / 'config.json'} cannot be read: {error}.") from error
    if not isinstance(declared, dict) or "model_type" not in declared:
        raise ModelLoadError(f"{path / 'config.json'} names no model_type.")
    if not any(path.glob("model*.safetensors")):
        raise ModelLoadError(
            f"{path} has no weights (model*.safetensors). Fetch the whole model again, or "
            "convert it with `mlx_lm.convert`."
        )
    try:
        # Lazily: what is cast or dequantized then need not exist twice.
        return load_model(path, lazy=True)
    # mlx-lm runs the code of one of a hundred architectures on the user's files.
    except Exception as error:
        raise ModelLoadError(
            f"The model in {path} (model_type {declared['model_type']!r}) cannot be "
            f"loaded: {_first_line(error)}. Its files may be incomplete, or mlx-lm does "
            "not support it."
        ) from error


def _read_tokenizer(path: Path, config: dict[str, Any]) -> TokenizerWrapper:
    try:
        # Said outright, or transformers asks on the terminal whether to run a model's code.
        options = {"trust_remote_code": False}
        return load_tokenizer(path, options, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # transformers has no error class of its own
        raise ModelLoadError(
            f"The tokenizer in {path} cannot be loaded: {_first_line(error)}. "
            "Fetch the model's tokenizer files again."
        ) from error


def _with_adapter(network: nn.Module, adapter: str) -> nn.Module:
    try:
        return load_adapters(network, adapter)
    except Exception as error:  # as in _read_network
        raise ModelLoadError(
            f"The adapter in {adapter} cannot be applied: {_first_line(error)}. It must "
            "hold adapter_config.json and adapters.safetensors, as mlx-lm trained them for "
            "this model."
        ) from error


def _arrays(network: nn.Module) -> Iterator[mx.array]:
    """Yield every array the network holds, the constants that are no parameters too."""
    for module in network.modules():
        for store in (dict(module), vars(module)):
            for _, value in tree_flatten(store, is_leaf=nn.Module.is_module):
                if isinstance(value, mx.array):
                    yield value


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".?") if lines else type(error).__name__
