"""Prompts in files: for `mtplx plan`, and to be pinned by `mtplx serve`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtplx.errors import ConfigError
from mtplx.types import Prompt

if TYPE_CHECKING:
    from mtplx.text.tokenizer import Tokenizer

_QUESTION = {"role": "user", "content": "x"}


def read_prompt(path: Path, tokenizer: Tokenizer) -> Prompt:
    """Render the prompt in a file: a .json file with a list of messages, or with a
    request body, or a text to be continued.

    Raises:
        ConfigError: The file cannot be read, or is something else.
        InvalidRequestError: The model cannot read it.
    """
    text = _read(path)
    if path.suffix != ".json":
        return tokenizer.render_text(text)
    messages, tools = _conversation(path, text)
    return tokenizer.render_chat(messages, tools=tools)


def read_pinned(path: Path, tokenizer: Tokenizer) -> Prompt:
    """Render what every conversation is to begin with: a text file is a system prompt, a
    .json file a request body with `messages` and `tools`.

    Raises:
        ConfigError, InvalidRequestError: As ``read_prompt``.
    """
    text = _read(path)
    messages: list[Any] = [{"role": "system", "content": text.strip()}]
    tools: list[Any] = []
    if path.suffix == ".json":
        messages, tools = _conversation(path, text)
    if all(message.get("role") in ("system", "developer") for message in messages):
        # What two questions would share.
        prompt = tokenizer.render_chat([*messages, _QUESTION], tools=tools)
        end = prompt.edges[0] if prompt.edges else prompt.stable_prefix_len
    else:
        prompt = tokenizer.render_chat(messages, tools=tools)
        end = prompt.stable_prefix_len
    if end == 0:
        raise ConfigError(
            f"{path} renders to nothing that other prompts would surely begin with."
        )
    return replace(
        prompt,
        token_ids=prompt.token_ids[:end],
        edges=tuple(edge for edge in prompt.edges if edge < end),
        stable_prefix_len=end,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The prompt {path} cannot be read: {error}") from None


def _conversation(path: Path, text: str) -> tuple[list[Any], list[Any]]:
    try:
        body: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    messages = body.get("messages") if isinstance(body, dict) else body
    tools = (body.get("tools") or []) if isinstance(body, dict) else []
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ConfigError(
            f"{path} must hold a list of messages, or an object with `messages`."
        )
    return messages, tools
