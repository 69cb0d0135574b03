"""The tables of request fields: what is ignored, and what is refused by name.

A field of a request body is one of four things, and this file decides which:

- honoured: declared in the model of the body;
- ignored: harmless whatever it says, and real clients send it;
- refused: part of the API, not supported here. A value that asks for nothing
  (``store: false``, ``functions: []``) is accepted, so that a client may spell its
  defaults out;
- unknown: refused, with the nearest known name as a hint. A typo that silently does
  nothing is worse than an error.

``null`` counts as absent everywhere. Pure functions; any thread.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported_parameter"
UNKNOWN = "unknown_parameter"
MISSING = "missing_required_parameter"


@dataclass(frozen=True)
class FieldTable:
    """How one JSON object of a request treats the fields it does not declare.

    Attributes:
        ignored: Field -> why any value of it is harmless.
        refused: Field -> the values that ask for nothing and are accepted.
    """

    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


BODY = FieldTable(
    ignored={
        "user": "names the end user for the provider's own statistics",
        "safety_identifier": "successor of `user`",
        "metadata": "labels for stored answers; nothing is stored",
        "service_tier": "there is one tier",
        "prompt_cache_options": "hints; the SessionBank has its own budget",
        "prompt_cache_retention": "as `prompt_cache_options`",
        "keep_alive": "ollama clients; how long a model stays is the server's setting",
    },
)

CHAT = FieldTable(
    ignored={
        **BODY.ignored,
        "prediction": "a hint to be faster; it changes no answer",
        "verbosity": "a hint on style for models that were trained on it",
    },
    refused={
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "store": (False,),
        "web_search_options": (),
    },
)

COMPLETION = FieldTable(ignored=BODY.ignored, refused={"suffix": ("",)})

MESSAGE = FieldTable(
    ignored={"annotations": "clients echo an answer's citations; they are not its text"},
    refused={"audio": (), "function_call": (), "refusal": ("",)},
)

CONTENT_PART = FieldTable(
    refused={
        "file": (),
        "image_url": (),
        "input_audio": (),
        "refusal": (),
        "video_url": (),
    },
)

TOOL = FieldTable(ignored={"cache_control": "as in a content part"}, refused={"custom": ()})

TOOL_CALL = FieldTable(
    ignored={"index": "clients echo the deltas of a stream; the order says it"},
    refused={"custom": ()},
)

TOOL_CHOICE = FieldTable(refused={"allowed_tools": (), "custom": ()})

STRUCTURED_OUTPUTS = FieldTable(
    refused={
        "disable_additional_properties": (False,),
        "disable_any_whitespace": (False,),
        "disable_fallback": (False,),
        "structural_tag": (),
        "whitespace_pattern": (),
    }
)

STREAM_OPTIONS = FieldTable(
    ignored={"continuous_usage_stats": "`usage` is told once, when it is complete"},
    refused={"include_obfuscation": (False,)},
)


def admit(
    body: Mapping[str, Any], honoured: Collection[str], table: FieldTable
) -> dict[str, Any]:
    """Return the honoured fields of a JSON object, nulls dropped.

    Raises:
        PydanticCustomError: A field is refused or unknown; its context names it.
    """
    admitted = {}
    for name, value in body.items():
        if value is None or name in table.ignored:
            continue
        if name in honoured:
            admitted[name] = value
        elif name not in table.refused:
            raise _unknown(name, [*honoured, *table.refused])
        elif not _asks_nothing(value, table.refused[name]):
            raise _refused(name, table.refused[name])
    return admitted


def field_error(code: str, sentence: str, name: str | None = None) -> PydanticCustomError:
    """Return the error for field ``name`` of the object (or value) under validation.

    ``body.py`` turns it into a ``RequestError`` with the whole path.
    """
    # Sentences quote the user's words: as context, braces in them are only text.
    return PydanticCustomError(code, "{sentence}", {"sentence": sentence, "field": name})


def shown(value: Any, limit: int = 40) -> str:
    """Return ``value`` as JSON, cut to about ``limit`` characters."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, int) and abs(value) >= 10**limit:
        return "a very large number"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _asks_nothing(value: Any, accepted: tuple[Any, ...]) -> bool:
    # False == 0 and True == 1 in Python, not in JSON.
    return any(type(value) is type(noop) and value == noop for noop in accepted)


def _refused(name: str, accepted: tuple[Any, ...]) -> PydanticCustomError:
    allowed = " or ".join(json.dumps(noop) for noop in accepted)
    advice = f"only {allowed} is accepted" if accepted else "leave it out"
    return field_error(UNSUPPORTED, f"`{name}` is not supported; {advice}.", name)


def _unknown(name: str, known: Collection[str]) -> PydanticCustomError:
    near = difflib.get_close_matches(name[:64], known, n=1)
    hint = f"did you mean `{near[0]}`?" if near else "leave it out."
    return field_error(UNKNOWN, f"Unknown field {shown(name)}; {hint}", name)
