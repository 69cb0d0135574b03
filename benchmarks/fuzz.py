"""schemathesis against a running server: does it do what its OpenAPI document says?

    pip install schemathesis
    mtplx serve demo --max-tokens 2
    python benchmarks/fuzz.py http://127.0.0.1:8000 --cases 2000

Sends requests that the document allows and requests that it forbids: every boundary of
every field (some thousands, the same each time), and random ones (``--cases``). Prints
how they were answered and what each check made of it, and exits with 1 if any failed.

Two things are changed in a body before it is sent, or the model would be busy for hours
and most requests end at its name: a number of tokens or answers that is valid and large
is cut down, and two of three names of models become the served one. What is wrong about
a body stays wrong. ``PASSED_OVER`` are the checks that are left out, and why.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from schemathesis import engine
from schemathesis.config import SchemathesisConfig
from schemathesis.engine.events import NonFatalError, ScenarioFinished

PASSED_OVER = {
    "positive_data_acceptance": "the document cannot say that a tool's result follows its "
    "call, or that a grammar in a body must be one that can be enforced",
}
_TOKENS = range(2, 10**40)
# Field -> valid values, which become the first of them.
COSTLY = {
    "max_tokens": _TOKENS,
    "max_completion_tokens": _TOKENS,
    "max_output_tokens": _TOKENS,
    "n": range(2, 17),
}
TIMEOUT_S = 300
SHOWN = 3


@dataclass
class Tally:
    """What was sent, and what came back."""

    cases: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[str]] = field(default_factory=dict)

    def add(self, event: ScenarioFinished) -> None:
        """Count the cases of one scenario."""
        recorder = event.recorder
        for case_id, interaction in recorder.interactions.items():
            self.cases += 1
            response = interaction.response
            meta = recorder.cases[case_id].value.meta
            mode = meta.generation.mode.value if meta else "other"
            self.answers[f"{mode} {_kind(response)}"] += 1
        for checks in recorder.checks.values():
            for check in checks:
                self.checks[f"{check.name} {check.status.value}"] += 1
                if (info := check.failure_info) is not None:
                    name = f"{recorder.label} {check.name}"
                    text = f"{info.failure.title}: {info.failure.message}"
                    self.fail(name, f"{text}\n{info.code_sample}")

    def fail(self, name: str, text: str) -> None:
        """Keep a failure, with others of its kind."""
        self.failures.setdefault(name, []).append(text)


def _kind(response: Any) -> str:
    if response is None:
        return "no answer"
    media_type = response.headers.get("content-type", [""])[0].partition(";")[0]
    return f"{response.status_code} {media_type}"


def cut(body: Any, model: str) -> None:
    """Make a body cheap to answer; what is wrong about it stays so."""
    if not isinstance(body, dict):
        return
    for name, costly in COSTLY.items():
        if type(body.get(name)) is int and body[name] in costly:
            body[name] = costly.start
    if isinstance(body.get("model"), str) and len(body["model"]) % 3 != 2:
        body["model"] = model


def fuzz(schema: Any, model: str, cases: int, phases: list[str]) -> Tally:
    """Run the phases; the random ones send at most that many cases, to all operations
    together."""

    @schemathesis.hook
    def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
        cut(case.body, model)

    config = schema.config
    config.update(continue_on_failure=True, request_timeout=TIMEOUT_S)
    config.phases.update(phases=phases)
    config.checks.update(excluded_check_names=list(PASSED_OVER))
    operations = sum(1 for _ in schema.get_all_operations())
    config.generation.update(max_examples=math.ceil(cases / operations))
    tally = Tally()
    for event in engine.from_schema(schema).execute():
        if isinstance(event, ScenarioFinished):
            tally.add(event)
        elif isinstance(event, NonFatalError):
            tally.fail(f"{event.label} error", str(event.value))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--phases", default="coverage,fuzzing,stateful")
    parser.add_argument("--api-key")
    parser.add_argument("--workers", type=int, default=1, help="requests at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    listed = requests.get(f"{options.url}/v1/models", headers=headers, timeout=10).json()
    schema = schemathesis.openapi.from_url(
        f"{options.url}/openapi.json",
        config=SchemathesisConfig(seed=options.seed),
        headers=headers,
    )
    schema.config.update(headers=headers or None, workers=options.workers)
    begin_s = time.perf_counter()
    model = listed["data"][0]["id"]
    tally = fuzz(schema, model, options.cases, options.phases.split(","))
    show(tally, time.perf_counter() - begin_s)
    sys.exit(1 if tally.failures else 0)


def show(tally: Tally, took_s: float) -> None:
    """Print the counts, and some of each kind of failure."""
    print(f"{tally.cases} cases in {took_s:.0f} s")
    for counted in (tally.answers, tally.checks):
        for name, count in sorted(counted.items()):
            print(f"{count:7d}  {name}")
    for name, texts in sorted(tally.failures.items()):
        print(f"\n{name}: {len(texts)}")
        for text in texts[:SHOWN]:
            print(text)


if __name__ == "__main__":
    main()
