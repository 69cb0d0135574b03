"""What is in a model folder, found out without loading it.

The files are looked at for what a broken download leaves, and the network is built from
its configuration alone: MLX makes arrays when they are evaluated, and nothing here is,
so a model of any size takes milliseconds and no memory. Runs on any one thread.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mtplx.models.cache import PromptCache, StateSize, cache_kind, state_size
from mtplx.models.precision import DTYPES, Precision, float32_bytes, plan_precision

UNSTATED_CONTEXT = 1 << 20
"""Context of a model whose configuration names none, as recurrent ones do."""

_LFS_POINTER = b"version https://git-lfs"
_FETCH_AGAIN = "Fetch the whole model again with `mtplx models pull`."
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")


@dataclass(frozen=True)
class Fault:
    """Something that keeps a folder from being loaded, and what to do about it."""

    what: str
    fix: str


@dataclass(frozen=True)
class Network:
    """What a configuration says the network is.

    Attributes:
        context_length: Most tokens of prompt and answer together.
        cache_kinds: How many layers have each kind of cache.
        float32_bytes: Its parameters as float32.
        float32_state: What the state of a sequence weighs as float32.
    """

    context_length: int
    cache_kinds: dict[str, int]
    float32_bytes: int
    float32_state: StateSize


@dataclass(frozen=True)
class Survey:
    """A model folder.

    Attributes:
        nbytes: All its files.
        stored_bytes: Its weights, as they are stored.
        quantized: Some of them are.
        dtype: What the configuration says the others are.
        faults: What keeps it from being loaded; nothing where all seems well.
        network: None where the configuration cannot be read or mlx-lm lacks it.
    """

    path: Path
    nbytes: int
    stored_bytes: int
    quantized: bool
    dtype: str
    faults: tuple[Fault, ...]
    network: Network | None


@dataclass(frozen=True)
class Weight:
    """What a model will take once it is loaded.

    Attributes:
        weight_bytes: Its parameters.
        row_bytes: The state of one token, in layers that keep one for each.
        dtype: Of the state.
        warning: What the choice of dtype costs, or None.
    """

    weight_bytes: int
    row_bytes: int
    dtype: str
    warning: str | None


def survey(folder: Path) -> Survey:
    """Look at a model folder."""
    faults = list(_config_faults(folder))
    config = {} if faults else _read_json(folder / "config.json")
    network = None
    if not faults:
        try:
            network = _network(config)
        # mlx-lm has the code of a hundred architectures, each with errors of its own.
        except Exception as error:
            faults.append(_unknown(config, error))
    faults += [*_weight_faults(folder), *_tokenizer_faults(folder)]
    return Survey(
        path=folder,
        nbytes=sum(_size(file) for file in folder.rglob("*")),
        stored_bytes=sum(_size(file) for file in folder.glob("model*.safetensors")),
        quantized="quantization" in config or "quantization_config" in config,
        dtype=_declared_dtype(config),
        faults=tuple(faults),
        network=network,
    )


def loaded_weight(
    found: Survey, dtype: Precision, *, device: str, available_bytes: int
) -> Weight:
    """Return what a model will take, by the rule that loading goes by."""
    assert found.network is not None
    network = found.network
    plan = plan_precision(
        dtype,
        device=device,
        float32_bytes=network.float32_bytes,
        available_bytes=available_bytes,
    )
    kept = found.quantized and not plan.dequantize
    chosen = plan.dtype or found.dtype
    width = DTYPES[chosen].size / 4
    nbytes = int(width * network.float32_bytes)
    if kept or plan.dtype is None:
        nbytes = found.stored_bytes
    row_bytes = int(width * network.float32_state.row_bytes)
    return Weight(nbytes, row_bytes, chosen, plan.warning)


def context_length(config: dict[str, Any]) -> int:
    """Return the most tokens of prompt and answer together."""
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"):
            value = section.get(name)
            if isinstance(value, int) and value > 0:
                return value
    return UNSTATED_CONTEXT


def check_supported(config: dict[str, Any]) -> Fault | None:
    """Return why mlx-lm cannot run what a configuration describes, or None."""
    try:
        _get_classes(config)
    except Exception as error:  # As in `survey`.
        return _unknown(config, error)
    return None


def _network(config: dict[str, Any]) -> Network:
    network_class, arguments_class = _get_classes(config)
    network: nn.Module = network_class(arguments_class.from_dict(config))
    cache = PromptCache(make_prompt_cache(network))
    # Only the shapes of what this would compute are looked at.
    network(mx.array([[0]]), cache=cache.layers)
    return Network(
        context_length=context_length(config),
        cache_kinds=dict(Counter(str(cache_kind(layer)) for layer in cache.layers)),
        float32_bytes=float32_bytes(network),
        float32_state=state_size(cache),
    )


def _unknown(config: dict[str, Any], error: Exception) -> Fault:
    kind = config.get("model_type")
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return Fault(
        f"mlx-lm cannot build a model of model_type {kind!r}: {reason}",
        "Update mlx-lm with `pip install -U mlx-lm`, or choose a model of another "
        "architecture.",
    )


def _config_faults(folder: Path) -> Iterator[Fault]:
    config = folder / "config.json"
    if not config.exists():
        yield Fault(f"{folder} has no config.json.", "Name the folder that has one.")
        return
    try:
        declared = _read_json(config)
    except (OSError, ValueError) as error:
        yield Fault(f"{config} cannot be read: {error}.", _FETCH_AGAIN)
        return
    if not isinstance(declared.get("model_type"), str):
        yield Fault(f"{config} names no model_type.", _FETCH_AGAIN)


def _weight_faults(folder: Path) -> Iterator[Fault]:
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        yield Fault(f"{folder} has no weights (model*.safetensors).", _FETCH_AGAIN)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            wanted = set(_read_json(index)["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield Fault(f"{index} cannot be read: {error}.", _FETCH_AGAIN)
        else:
            missing = sorted(wanted - {file.name for file in files})
            if missing:
                yield Fault(f"{folder} lacks {', '.join(missing)}.", _FETCH_AGAIN)
    for file in files:
        yield from _file_faults(file)


def _file_faults(file: Path) -> Iterator[Fault]:
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(_LFS_POINTER))
            if begin == _LFS_POINTER:
                yield Fault(f"{file} only points to the weights.", "Run `git lfs pull`.")
                return
            header_bytes = int.from_bytes(begin[:8], "little")
            stream.seek(8)
            header = json.loads(stream.read(min(header_bytes, file.stat().st_size)))
            header.pop("__metadata__", None)
            ends = (tensor["data_offsets"][1] for tensor in header.values())
            expected = 8 + header_bytes + max(ends, default=0)
    except OSError as error:
        yield Fault(
            f"{file} cannot be read ({error.strerror}).",
            f"Give yourself the right to read it: `chmod u+r {file}`.",
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        yield Fault(f"{file} is no safetensors file, or was cut off.", _FETCH_AGAIN)
    else:
        found = file.stat().st_size
        if found != expected:
            yield Fault(
                f"{file} has {found:,} bytes and should have {expected:,}.", _FETCH_AGAIN
            )


def _tokenizer_faults(folder: Path) -> Iterator[Fault]:
    if not any((folder / name).exists() for name in _TOKENIZERS):
        yield Fault(f"{folder} has no tokenizer ({_TOKENIZERS[0]}).", _FETCH_AGAIN)


def _declared_dtype(config: dict[str, Any]) -> str:
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        for name in ("dtype", "torch_dtype"):
            if section.get(name) in DTYPES:
                return str(section[name])
    return "bfloat16"


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    return content


def _size(file: Path) -> int:
    try:
        return os.stat(file).st_size if file.is_file() else 0
    except OSError:
        return 0  # A link to nothing.
