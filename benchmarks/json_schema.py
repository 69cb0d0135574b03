"""Ask for JSON by schema, sampled at temperature 1, and validate every answer.

    python benchmarks/json_schema.py http://127.0.0.1:8000 --runs 10

Ten schemas of different kinds, each asked for streamed and not; they bound every text,
list and integer, since a small model may not end one by itself. An answer counts only if
it ended by itself (``finish_reason`` is stop) and the package jsonschema, which the
benchmark needs besides the project (``pip install jsonschema``), finds it valid, formats
included. What fails is printed. Exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from jsonschema import Draft202012Validator
from openai import OpenAI, OpenAIError


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def whole(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def record(*optional: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


PLACE = record(
    street=text(30), city=text(20), zip={"type": "string", "pattern": "^\\d{5}$"}
)
SCHEMAS: dict[str, dict[str, Any]] = {
    "flat object": record(
        name=text(30),
        age=whole(0, 120),
        job=text(30),
        married={"type": "boolean"},
    ),
    "nested objects": record(
        order=whole(1, 99999),
        customer=record(name=text(30), address=PLACE),
        payment=record(method=text(12), card=record(last={"const": "0000"})),
    ),
    "bounded arrays": record(
        colors={"type": "array", "items": text(10), "minItems": 2, "maxItems": 4},
        point={
            "type": "array",
            "prefixItems": [whole(-100, 100), whole(-100, 100)],
            "items": False,
            "minItems": 2,
        },
        grid={
            "type": "array",
            "items": {
                "type": "array",
                "items": {"enum": [0, 1]},
                "minItems": 3,
                "maxItems": 3,
            },
            "minItems": 3,
            "maxItems": 3,
        },
    ),
    "enums": record(
        size={"enum": ["small", "medium", "large", "extra large"]},
        stars={"enum": [1, 2, 3, 4, 5]},
        mixed={"enum": ["yes", 0, False, None, {"a": [1]}]},
        unicode={"enum": ["größe", "naïve", "日本", 'a"b', "tab\there"]},
    ),
    "number ranges": record(
        percent=whole(0, 100),
        degrees={"type": "number", "minimum": -90, "maximum": 90},
        share={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        dozens={"type": "integer", "multipleOf": 12, "minimum": 12, "maximum": 144},
        below={"type": "integer", "exclusiveMaximum": -5, "minimum": -1000},
    ),
    "optional fields": record(
        "subtitle",
        "year",
        "pages",
        "tags",
        title=text(40),
        subtitle=text(40),
        year=whole(1500, 2030),
        pages=whole(1, 3000),
        tags={"type": "array", "items": text(10), "maxItems": 3},
    ),
    "anyOf": record(
        shape={
            "anyOf": [
                record(kind={"const": "circle"}, radius=whole(1, 100)),
                record(
                    kind={"const": "box"},
                    width=whole(1, 100),
                    height=whole(1, 100),
                ),
                {"type": "null"},
            ]
        },
        label={"anyOf": [text(15), whole(0, 9)]},
    ),
    # Nothing bounds how deep it gets but that a text is likelier than one more list.
    "recursive references": {
        "$defs": {
            "word": text(10),
            "words": {
                "anyOf": [
                    {"$ref": "#/$defs/word"},
                    {
                        "type": "array",
                        "items": {"$ref": "#/$defs/words"},
                        "minItems": 1,
                        "maxItems": 2,
                    },
                ]
            },
        },
        **record(
            topic={"$ref": "#/$defs/word"},
            words={"type": "array", "items": {"$ref": "#/$defs/words"}, "maxItems": 3},
            again={"$ref": "#/properties/topic"},
        ),
    },
    "strings": record(
        code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
        prefix={"type": "string", "pattern": "^ab+", "maxLength": 8},
        day={"type": "string", "format": "date"},
        id={"type": "string", "format": "uuid"},
        host={"type": "string", "format": "ipv4"},
        short={"type": "string", "minLength": 3, "maxLength": 5},
    ),
    "const, boolean, null": record(
        version={"const": 2},
        kind={"const": {"nested": [True, None, "x"]}},
        active={"type": "boolean"},
        nothing={"type": "null"},
        maybe={"type": ["boolean", "null"]},
        never={"const": False},
    ),
}


@dataclass(frozen=True)
class Run:
    """One answer: why it does not count, None if it does."""

    schema: str
    streamed: bool
    tokens: int
    fault: str | None


class Bench:
    """Asks one server."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._client = OpenAI(
            base_url=f"{url.rstrip('/')}/v1",
            api_key=options.api_key,
            timeout=options.timeout_s,
            max_retries=0,
        )
        self._model = options.model or self._client.models.list().data[0].id
        self._max_tokens = options.max_tokens

    def run(self, name: str, streamed: bool, seed: int) -> Run:
        try:
            answer, reason, tokens = self._ask(name, streamed, seed)
        except OpenAIError as error:
            return Run(name, streamed, 0, f"{type(error).__name__}: {error}")
        if reason != "stop":
            return Run(name, streamed, tokens, f"finish_reason {reason}: {answer[-300:]}")
        return Run(name, streamed, tokens, fault(SCHEMAS[name], answer))

    def _ask(self, name: str, streamed: bool, seed: int) -> tuple[str, str | None, int]:
        """The text, its finish_reason, and how many tokens it took."""
        asked: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"Invent a JSON example of {name}."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": SCHEMAS[name]},
            },
            "temperature": 1,
            "max_tokens": self._max_tokens,
            "seed": seed,
        }
        create = self._client.chat.completions.create
        if not streamed:
            whole = create(**asked)
            choice = whole.choices[0]
            tokens = whole.usage.completion_tokens
            return choice.message.content or "", choice.finish_reason, tokens
        pieces, reasons, tokens = [], [], 0
        usage = {"include_usage": True}
        for chunk in create(**asked, stream=True, stream_options=usage):
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            for part in chunk.choices:
                pieces.append(part.delta.content or "")
                reasons += [part.finish_reason] if part.finish_reason else []
        return "".join(pieces), "+".join(reasons) or None, tokens


def fault(schema: dict[str, Any], answer: str) -> str | None:
    """Why the answer is not valid; None if it is."""
    try:
        value = json.loads(answer, parse_constant=_no_number)
    except ValueError as error:
        return f"no JSON, {error}: {answer}"
    checker = Draft202012Validator.FORMAT_CHECKER
    errors = Draft202012Validator(schema, format_checker=checker).iter_errors(value)
    found = [f"{error.json_path}: {error.message}" for error in errors]
    return f"{'; '.join(found)}: {answer}" if found else None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def row(name: str, runs: list[Run]) -> str:
    longest = max(run.tokens for run in runs)
    return f"| {name} | {share(runs, False)} | {share(runs, True)} | {longest} |"


def share(runs: list[Run], streamed: bool) -> str:
    valid = [run.fault is None for run in runs if run.streamed == streamed]
    return f"{sum(valid)} of {len(valid)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--runs", type=int, default=10, help="for each schema and way")
    parser.add_argument("--only", choices=list(SCHEMAS), help="this schema alone")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--timeout-s", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    options = parser.parse_args()
    bench = Bench(options.url, options)
    # Each run has its own seed, so that streamed ones are not the others over again.
    asked = [
        (name, streamed)
        for name in ([options.only] if options.only else SCHEMAS)
        for _ in range(options.runs)
        for streamed in (False, True)
    ]
    runs: list[Run] = []
    began_s = time.monotonic()
    with ThreadPoolExecutor(options.concurrency) as pool:
        seeds = range(options.seed, options.seed + len(asked))
        print("| schema | valid | valid, streamed | longest, in tokens |")
        print("| --- | --- | --- | --- |", flush=True)
        answered = pool.map(bench.run, *zip(*asked, strict=True), seeds)
        for name, group in groupby(answered, key=lambda run: run.schema):
            of_schema = list(group)
            print(row(name, of_schema), flush=True)
            runs += of_schema
    print(row("all", runs))
    print(f"{len(runs)} answers in {time.monotonic() - began_s:.0f} s")
    for run in runs:
        if run.fault is not None:
            print(f"{run.schema}{', streamed' if run.streamed else ''}: {run.fault}")
    sys.exit(any(run.fault is not None for run in runs))


if __name__ == "__main__":
    main()
