"""Times free streams beside streams that are held to a grammar.

    python benchmarks/constrained.py demo --free 2 --beside 2

The free streams decode beside as many others in each round: free ones, ones held to a
JSON schema, ones held to a regular expression. Rounds take turns, so that a busy machine
slows all of them. The table shows the gaps between the tokens of the free streams while
all streams decode, and their ratios to the round without grammars.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.types import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TextDelta,
)

# isort: split
from llguidance import LLMatcher

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}
GRAMMARS = {
    "free": None,
    "JSON schema": LLMatcher.grammar_from_json_schema(PEOPLE),
    "regular expression": LLMatcher.grammar_from_regex(r"([a-z]{2,12} ){1000}[0-9]+"),
}


@dataclass
class Stream:
    """Notes when its tokens came, on the engine's thread."""

    times_s: list[float] = field(default_factory=list)
    end: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def __call__(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.times_s.append(time.perf_counter())
        elif isinstance(event, Finished | Failed):
            self.end.put(event)

    def wait(self) -> None:
        end = self.end.get()
        if isinstance(end, Failed):
            raise end.error


def gaps_s(
    engine: Engine, prompt: Prompt, grammar: str | None, options: argparse.Namespace
) -> list[float]:
    """Return the gaps of the free streams while all streams decode."""
    free = [Stream() for _ in range(options.free)]
    beside = [Stream() for _ in range(options.beside)]
    for index, stream in enumerate([*free, *beside]):
        engine.submit(
            GenerationRequest(
                request_id=f"{id(stream)}",
                prompt=prompt,
                max_new_tokens=options.tokens,
                arrival_s=time.perf_counter(),
                sampling=SamplingParams(seed=index),
                ignore_eos=True,
                grammar=grammar if stream in beside else None,
            ),
            stream,
        )
    for stream in (*free, *beside):
        stream.wait()
    begin_s = max(stream.times_s[0] for stream in (*free, *beside))
    end_s = min(stream.times_s[-1] for stream in (*free, *beside))
    return [
        after - before
        for stream in free
        for before, after in zip(stream.times_s, stream.times_s[1:], strict=False)
        if begin_s <= before and after <= end_s
    ]


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--free", type=int, default=2)
    parser.add_argument("--beside", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    engine = Engine(partial(Model.load, options.model), SessionBank(), Settings())
    engine.start()
    prompt = engine.tokenizer.render_text("These people have come to the market today:")
    gaps: dict[str, list[float]] = defaultdict(list)
    for repeat in range(options.repeats + 1):
        for name, grammar in GRAMMARS.items():
            found = gaps_s(engine, prompt, grammar, options)
            if repeat:  # The first round warms up.
                gaps[name] += found
    engine.stop()
    shares = {"p10": 0.1, "p50": 0.5, "p99": 0.99}
    print(f"{options.free} free streams beside {options.beside} that are")
    print(f"{'':<22}{'gaps':>6}", *(f"{name + ' ms':>9}{'ratio':>7}" for name in shares))
    for name, values in gaps.items():
        cells = [
            f"{quantile(values, share) * 1e3:>9.1f}"
            f"{quantile(values, share) / quantile(gaps['free'], share):>7.2f}"
            for share in shares.values()
        ]
        print(f"{name:<22}{len(values):>6}", *cells)


if __name__ == "__main__":
    main()
