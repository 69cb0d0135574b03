"""The one reader of configuration: flag > environment > file > default.

Defaults, meanings and bounds live in ``Settings`` and nowhere else; the command line
takes its help from here. The file is TOML, ``mtplx/config.toml`` in the user's
configuration folder or the one that ``MTPLX_CONFIG`` names; the environment variable
of a setting is ``MTPLX_`` and its name in capitals.
"""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mtplx.errors import ConfigError


class Settings(BaseModel):
    """Everything a user may set. Frozen once read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "demo", description="Folder, hub id, GGUF file, or `demo` (SmolLM2-135M-Instruct)."
    )
    adapter: str | None = Field(None, description="Folder of a LoRA adapter.")
    also: str = Field(
        "",
        description="Further models, separated by commas, each as NAME=MODEL or "
        "NAME=MODEL+ADAPTER; loaded when first asked for.",
    )
    cached_models: bool = Field(
        False,
        description="Serve the models in the hub's local cache too, under their ids; "
        "loaded when first asked for.",
    )
    aliases: str = Field(
        "",
        description="Other names for models, separated by commas, each as ALIAS=NAME; an "
        "alias may end in *.",
    )
    max_models: int = Field(
        2, ge=1, description="Most models in memory at once; the first one stays."
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        description="Unload a model, the first one excepted, that nobody used for this "
        "many seconds (default: never).",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks one.")
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Where to compute: auto, cpu or gpu."
    )
    dtype: Literal["auto", "model", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Weights and KV cache: auto (float32 on the CPU, the model's own "
        "elsewhere), model, float32, float16 or bfloat16.",
    )
    prefill_window: int | None = Field(
        None,
        ge=1,
        description="Longest span one prefill step computes, in tokens "
        "(default: 512 on the CPU, 2048 on a GPU).",
    )
    tail_grid: int = Field(
        32, ge=1, description="Grid in tokens on which the last span of a prompt is cut."
    )
    enable_chunked_prefill: bool = Field(
        True, description="Read prompts in spans beside running streams."
    )
    max_num_batched_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens one iteration computes, decodes and prefill together "
        "(default: the prefill window; without chunked prefill the context).",
    )
    max_num_seqs: int = Field(32, ge=1, description="Most requests that run at once.")
    max_num_partial_prefills: int = Field(
        4, ge=1, description="Most prompts that are read at once."
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Most tokens of one prompt in one iteration; 0 sets no limit.",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="Longest gap between the tokens of a stream while prompts are read, "
        "in ms (default: 2.6 times its undisturbed gap).",
    )
    overlap_decode: bool | None = Field(
        None,
        description="Hand the next step to the device before the tokens of the last one "
        "are read (default: where the device computes beside the host, that is on a GPU).",
    )
    max_kv_size: int = Field(
        256_000, ge=0, description="Tokens the SessionBank may hold; 0 keeps nothing."
    )
    kv_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes of KV state, of running requests and the SessionBank together "
        "(default: what the machine has left beside the weights).",
    )
    kv_disk: str | None = Field(
        None, description="Folder that keeps KV state across restarts (default: none)."
    )
    kv_disk_bytes: int = Field(
        20 * 1024**3, ge=0, description="Bytes the folder of `kv_disk` may hold."
    )
    kv_disk_daily_bytes: int = Field(
        100 * 1024**3, ge=0, description="Bytes written to `kv_disk` in 24 hours at most."
    )
    pin_prompt: str | None = Field(
        None,
        description="Text file with a system prompt, or JSON with `messages` and `tools`, "
        "that is read at start and never evicted.",
    )
    cache_isolation: Literal["none", "api-key", "prompt-cache-key"] = Field(
        "none",
        description="Who shares KV state: none (everybody), api-key (requests with the "
        "same key) or prompt-cache-key (requests that name the same one).",
    )
    max_tokens: int | None = Field(
        None,
        ge=1,
        description="Answer length for requests that name none (default: the context).",
    )
    max_queue: int = Field(64, ge=1, description="Requests that may wait; more get a 429.")
    max_body_bytes: int = Field(
        32 * 1024 * 1024, ge=1024, description="Largest request body, in bytes."
    )
    api_key: str | None = Field(
        None,
        repr=False,
        description="Keys that clients must send, separated by commas.",
    )
    api_key_file: str | None = Field(None, description="File with a key on each line.")
    auth: bool = Field(
        True, description="Ask for a key when listening beyond this machine."
    )
    cors_origins: str = Field(
        "", description="Origins that browsers may call from, separated by commas, or *."
    )
    sse_keepalive: Literal["comment", "event", "off"] = Field(
        "comment", description="What a silent stream sends: comment, event or off."
    )
    normalize_billing_header: bool = Field(
        True,
        description="Set the changing value in Claude Code's billing header to zeros.",
    )
    log_prompts: bool = Field(False, description="Write prompts and answers to the log.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level: debug, info, warning or error."
    )

    def further_models(self) -> dict[str, FurtherModel]:
        """Return what ``also`` asks for, by name.

        Raises:
            ConfigError: It is not as it should be.
        """
        found: dict[str, FurtherModel] = {}
        for entry in filter(None, (entry.strip() for entry in self.also.split(","))):
            name, _, source = (word.strip() for word in entry.partition("="))
            model, plus, adapter = (word.strip() for word in source.partition("+"))
            if not name or not model or (plus and not adapter):
                raise ConfigError(
                    f"`also` has {entry!r}; write NAME=MODEL or NAME=MODEL+ADAPTER."
                )
            if name in found:
                raise ConfigError(f"`also` has two models called {name!r}; rename one.")
            found[name] = FurtherModel(model, adapter or None)
        return found


@dataclass(frozen=True)
class FurtherModel:
    """A model of ``also``, and the folder of its adapter."""

    model: str
    adapter: str | None


@dataclass(frozen=True)
class Configuration:
    """The effective settings and where each came from
    (``flag``, ``environment``, ``file`` or ``default``)."""

    settings: Settings
    sources: dict[str, str]


def read_configuration(
    flags: Mapping[str, Any] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Configuration:
    """Merge flags, environment and file over the defaults.

    Args:
        flags: Values from the command line; None means not given.
        environment: Replaces ``os.environ``.
        file: A TOML file that must exist. Default: ``MTPLX_CONFIG``, else the user's
            ``config.toml`` where there is one.

    Raises:
        ConfigError: A value or a name is wrong; the message says where and why.
    """
    environment = os.environ if environment is None else environment
    layers = [
        ("file", _read_file(file, environment)),
        (
            "environment",
            {
                name: environment[key]
                for name in Settings.model_fields
                if (key := f"MTPLX_{name.upper()}") in environment
            },
        ),
        ("flag", {k: v for k, v in (flags or {}).items() if v is not None}),
    ]
    values: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    try:
        return Configuration(Settings(**values), sources)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        where = sources.get(name, "default")
        if name not in Settings.model_fields:
            raise ConfigError(
                f"Unknown setting {name!r} in the {where}. "
                f"Known settings: {', '.join(Settings.model_fields)}."
            ) from None
        hint = Settings.model_fields[name].description
        # Secrets are not shown.
        shown = repr(values[name]) if Settings.model_fields[name].repr else "what it is"
        raise ConfigError(
            f"Setting {name!r} from the {where} cannot be {shown}: "
            f"{first['msg']}. It means: {hint}"
        ) from None


def _read_file(file: Path | None, environment: Mapping[str, str]) -> dict[str, Any]:
    named = file or (Path(p) if (p := environment.get("MTPLX_CONFIG")) else None)
    path = named or config_folder(environment) / "config.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is None:
            return {}
        raise ConfigError(f"The configuration file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error}"
        ) from None


def config_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of ``config.toml``, which need not exist."""
    return _user_folder("XDG_CONFIG_HOME", ".config", environment)


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder for fetched and converted models, which need not exist.

    ``MTPLX_CACHE_DIR`` names another one.
    """
    environment = os.environ if environment is None else environment
    if named := environment.get("MTPLX_CACHE_DIR"):
        return Path(named).expanduser()
    default = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return _user_folder("XDG_CACHE_HOME", default, environment)


def _user_folder(
    variable: str, default: str, environment: Mapping[str, str] | None
) -> Path:
    environment = os.environ if environment is None else environment
    base = environment.get(variable)
    return (Path(base) if base else Path.home() / default) / "mtplx"
