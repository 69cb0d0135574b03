"""What each client has to be told to talk to a server of ours.

Pure. A recipe holds what goes into files, what into the environment, and what is typed;
``config_files.py`` writes. A client whose settings are kept where others should not write
(a secret store, a database) gets a command or an explanation instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_KEY = "none"
"""Sent where a client insists on a key and the server asks for none."""

NAME = "mtplx"
_TIMEOUT_MS = 20 * 60 * 1000
"""Patience for a prompt that is read for minutes."""


@dataclass(frozen=True)
class Target:
    """The server that a client is to talk to.

    Attributes:
        url: Without `/v1`.
        model: The name to ask for.
        context_tokens: Of the model, None where it is not known.
        api_key: None where the server asks for none.
        environment: Where clients look for their folders.
    """

    url: str
    model: str
    context_tokens: int | None = None
    api_key: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def openai_url(self) -> str:
        """Where OpenAI's API begins."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """What to send as a key."""
        return self.api_key or NO_KEY

    @property
    def answer_tokens(self) -> int | None:
        """An output limit that leaves the prompt most of the context."""
        return self.context_tokens and min(self.context_tokens // 4, 32_768)

    def folder(self, variable: str, default: str) -> Path:
        """Return the folder that a variable names, or one below the user's home."""
        named = self.environment.get(variable)
        return Path(named).expanduser() if named else Path.home() / default


@dataclass(frozen=True)
class ConfigFile:
    """A part of a client's configuration file.

    Attributes:
        path: Its suffix (.json, .toml, .yaml, .yml) says the format.
        content: To be merged into what is there.
        head: Keys that the file must have, and that are left as they are.
    """

    path: Path
    content: Any
    head: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """How to connect a client.

    Attributes:
        title: The client's name.
        files: Parts of its configuration files.
        instead: Variables that do the same as the files, for one shell.
        needed: Variables that are needed in any case.
        command: What to run then.
        notes: What else is to be known.
    """

    title: str
    files: tuple[ConfigFile, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    needed: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None
    notes: tuple[str, ...] = ()


def claude_code(target: Target) -> Recipe:
    """Anthropic's API; its base URL has no `/v1`."""
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_MODEL": target.model,
        # It asks a small model for titles and the like.
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
    }
    folder = target.folder("CLAUDE_CONFIG_DIR", ".claude")
    return Recipe(
        "Claude Code",
        (ConfigFile(folder / "settings.json", {"env": environment}),),
        instead=environment,
        command="claude",
        notes=(
            "The file holds for every session, the variables for one shell. An "
            "ANTHROPIC_API_KEY that is set must be unset.",
        ),
    )


def codex(target: Target) -> Recipe:
    """OpenAI's Responses. The profile is a file of its own, so that the default stays."""
    folder = target.folder("CODEX_HOME", ".codex")
    provider: dict[str, Any] = {
        "name": "MTPLX",
        "base_url": target.openai_url,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _TIMEOUT_MS,
    }
    if target.api_key is not None:
        provider["env_key"] = "MTPLX_API_KEY"
    profile: dict[str, Any] = {"model": target.model, "model_provider": NAME}
    if target.context_tokens is not None:
        profile["model_context_window"] = target.context_tokens
    return Recipe(
        "Codex",
        (
            ConfigFile(folder / "config.toml", {"model_providers": {NAME: provider}}),
            ConfigFile(folder / f"{NAME}.config.toml", profile),
        ),
        needed={} if target.api_key is None else {"MTPLX_API_KEY": target.api_key},
        command=f"codex --profile {NAME}",
        notes=("Serve with `--sse-keepalive event`: Codex counts no comments as life.",),
    )


def opencode(target: Target) -> Recipe:
    """OpenAI's chat, by a provider of its own."""
    folder = target.folder("XDG_CONFIG_HOME", ".config") / "opencode"
    model: dict[str, Any] = {"name": target.model}
    if target.context_tokens is not None:
        model["limit"] = {"context": target.context_tokens, "output": target.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "MTPLX",
        "options": {"baseURL": target.openai_url, "apiKey": target.key},
        "models": {target.model: model},
    }
    head = {"$schema": "https://opencode.ai/config.json"}
    content = {"provider": {NAME: provider}}
    return Recipe(
        "opencode",
        (ConfigFile(folder / "opencode.json", content, head),),
        command=f"opencode --model {NAME}/{target.model}",
    )


def cline(target: Target) -> Recipe:
    """Its settings are in the editor's secret store; its own command writes there."""
    return Recipe(
        "Cline",
        command=f"cline auth -p openai -k {target.key} -b {target.openai_url} "
        f"-m {target.model}",
        notes=(
            "In the editor: API Provider `OpenAI Compatible`, Base URL "
            f"{target.openai_url}, API Key {target.key}, Model ID {target.model}"
            + (
                f", Context Window Size {target.context_tokens}."
                if target.context_tokens
                else "."
            ),
        ),
    )


def continue_(target: Target) -> Recipe:
    """OpenAI's chat, as one of its models."""
    model: dict[str, Any] = {
        "name": f"MTPLX {target.model}",
        "provider": "openai",
        "model": target.model,
        "apiBase": target.openai_url,
        "apiKey": target.key,
        "roles": ["chat", "edit", "apply"],
    }
    if target.context_tokens is not None:
        model["defaultCompletionOptions"] = {
            "contextLength": target.context_tokens,
            "maxTokens": target.answer_tokens,
        }
    folder = target.folder("CONTINUE_GLOBAL_DIR", ".continue")
    head = {"name": "Local", "version": "0.0.1", "schema": "v1"}
    return Recipe(
        "Continue", (ConfigFile(folder / "config.yaml", {"models": [model]}, head),)
    )


def zed(target: Target) -> Recipe:
    """OpenAI's chat. It refuses keys in its settings."""
    model: dict[str, Any] = {
        "name": target.model,
        "display_name": target.model,
        "max_tokens": target.context_tokens or 32_768,
    }
    if target.answer_tokens is not None:
        model["max_output_tokens"] = target.answer_tokens
    provider = {"api_url": target.openai_url, "available_models": [model]}
    folder = target.folder("XDG_CONFIG_HOME", ".config") / "zed"
    content = {"language_models": {"openai_compatible": {NAME: provider}}}
    return Recipe(
        "Zed",
        (ConfigFile(folder / "settings.json", content),),
        needed={"MTPLX_API_KEY": target.key},
        notes=("Zed must be started with the variable, or be given the key in its panel.",),
    )


def aider(target: Target) -> Recipe:
    """OpenAI's chat, through litellm: hence the prefix."""
    name = f"openai/{target.model}"
    home = Path.home()
    files = [
        ConfigFile(
            home / ".aider.conf.yml",
            {
                "model": name,
                "openai-api-base": target.openai_url,
                "openai-api-key": target.key,
            },
        )
    ]
    if target.context_tokens is not None:
        limits = {
            "max_tokens": target.answer_tokens,
            "max_input_tokens": target.context_tokens,
            "max_output_tokens": target.answer_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        files.append(ConfigFile(home / ".aider.model.metadata.json", {name: limits}))
    return Recipe(
        "aider",
        tuple(files),
        instead={"OPENAI_API_BASE": target.openai_url, "OPENAI_API_KEY": target.key},
        command=f"aider --model {name}",
    )


def open_webui(target: Target) -> Recipe:
    """It reads the environment at its first start, and its database after that."""
    return Recipe(
        "Open WebUI",
        needed={
            "OPENAI_API_BASE_URL": target.openai_url,
            "OPENAI_API_KEY": target.key,
        },
        command="open-webui serve",
        notes=(
            "The variables count at its first start only; later, add the connection in "
            "Admin Settings, Connections.",
            "From a container this machine is `host.docker.internal`, not 127.0.0.1; serve "
            "with `--host 0.0.0.0` and a key then.",
        ),
    )


def llm(target: Target) -> Recipe:
    """A model of its OpenAI plugin."""
    default = ".config/io.datasette.llm"
    if sys.platform == "darwin":
        default = "Library/Application Support/io.datasette.llm"
    folder = target.folder("LLM_USER_PATH", default)
    model = {
        "model_id": f"{NAME}/{target.model}",
        "model_name": target.model,
        "api_base": target.openai_url,
    }
    notes: tuple[str, ...] = ()
    if target.api_key is not None:
        model["api_key_name"] = NAME
        notes = (f"Store the key once: `llm keys set {NAME} --value {target.api_key}`.",)
    return Recipe(
        "llm",
        (ConfigFile(folder / "extra-openai-models.yaml", [model]),),
        command=f"llm -m {NAME}/{target.model} 'Hello'",
        notes=notes,
    )


CLIENTS: Mapping[str, Callable[[Target], Recipe]] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "cline": cline,
    "continue": continue_,
    "zed": zed,
    "aider": aider,
    "open-webui": open_webui,
    "llm": llm,
}
"""By the name that `mtplx connect` knows them by."""
