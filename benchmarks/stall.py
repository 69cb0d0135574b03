"""Streams decode, a long prompt arrives: how long do the streams stand still?

Works against any server that speaks OpenAI's chat API; several are measured one after
another and shown side by side:

    python benchmarks/stall.py mtplx=http://127.0.0.1:8000/v1 mlx-lm=http://127.0.0.1:8080/v1

For each server: the streams' gaps before the prompt arrives and while it is read, the
prompt's TTFT beside them, and tokens a second over the whole run, prompt tokens
included. Prompts differ from run to run, so that no cache helps. ``--clients 4``
measures throughput instead: that many clients at once, with prompts of mixed lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from openai import OpenAI

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")
WAIT_S = 600


@dataclass
class Stream:
    """One request and when its pieces came, in seconds of ``time.perf_counter``."""

    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s

    def gaps_s(self, start_s: float, end_s: float) -> list[float]:
        """Gaps that end in ``[start_s, end_s)``."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return [b - a for a, b in pairs if start_s <= b < end_s]


def text(words: int, seed: object) -> str:
    """Return a text of about that many tokens, another one for each seed."""
    pick = random.Random(str(seed))
    return " ".join(pick.choice(WORDS) for _ in range(words))


def run(
    client: OpenAI, model: str, words: int, new_tokens: int, seed: object, into: Stream
) -> None:
    """Send one streaming request and note when each piece of text arrives."""
    into.sent_s = time.perf_counter()
    try:
        chunks = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": text(words, seed) + "\nTell a story."}],
            max_tokens=new_tokens,
            temperature=0,
            # Keeps a stream alive whatever the model has to say.
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                into.times_s.append(time.perf_counter())
            if chunk.usage is not None:
                into.prompt_tokens = chunk.usage.prompt_tokens
                into.completion_tokens = chunk.usage.completion_tokens
    except Exception as error:  # shown in the table; the other servers go on
        into.error = str(error)


@dataclass
class Result:
    """One run against one server. Seconds, but for the ratio and the rates."""

    undisturbed_gap_s: float
    worst_gap_s: float
    p99_gap_s: float
    worst_over_undisturbed: float
    long_ttft_s: float
    total_tok_s: float


def measure_stall(
    client: OpenAI, model: str, streams: int, words: int, new_tokens: int, seed: object
) -> Result:
    """Let streams decode, send the long prompt, and wait for its first tokens."""
    running = [Stream() for _ in range(streams)]
    threads = [
        threading.Thread(
            target=run, args=(client, model, 20, new_tokens, f"{seed}/{n}", stream)
        )
        for n, stream in enumerate(running)
    ]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    settled = 15
    while any(len(stream.times_s) < settled and not stream.error for stream in running):
        time.sleep(0.01)
        assert time.perf_counter() - begin_s < WAIT_S
    assert not any(s.error for s in running), [s.error for s in running]
    calm_s = max(stream.times_s[settled - 6] for stream in running)
    long = Stream()
    arrived_s = time.perf_counter()
    run(client, model, words, 4, f"{seed}/long", long)
    for thread in threads:
        thread.join(WAIT_S)
    end_s = time.perf_counter()
    errors = [s.error for s in [*running, long] if s.error]
    assert not errors, errors
    assert long.times_s, "the model had nothing to say to the long prompt; run it again"
    first_s = long.times_s[0]
    calm = [g for s in running for g in s.gaps_s(calm_s, arrived_s)]
    # A stream that stood still until the prompt was read shows it in the gap after.
    stalled = [g for s in running for g in s.gaps_s(arrived_s, first_s + 2 * max(calm))]
    alive = all(s.times_s[-1] > first_s for s in running)
    assert alive, "a stream ended before the long prompt was read; raise --new-tokens"
    undisturbed = statistics.median(calm)
    ordered = sorted(stalled)
    tokens = sum(s.prompt_tokens + s.completion_tokens for s in [*running, long])
    return Result(
        undisturbed_gap_s=undisturbed,
        worst_gap_s=ordered[-1],
        p99_gap_s=ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)],
        worst_over_undisturbed=ordered[-1] / undisturbed,
        long_ttft_s=long.ttft_s,
        total_tok_s=tokens / (end_s - begin_s),
    )


def measure_throughput(
    client: OpenAI, model: str, clients: int, words: int, new_tokens: int, seed: object
) -> Result:
    """Run clients with prompts of mixed lengths at once."""
    lengths = [max(8, words * (n % 4 + 1) // 4) for n in range(clients)]
    streams = [Stream() for _ in lengths]
    threads = [
        threading.Thread(
            target=run, args=(client, model, length, new_tokens, f"{seed}/{n}", stream)
        )
        for n, (length, stream) in enumerate(zip(lengths, streams, strict=True))
    ]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    took_s = time.perf_counter() - begin_s
    errors = [s.error for s in streams if s.error]
    assert not errors, errors
    gaps = sorted(g for s in streams for g in s.gaps_s(0, math.inf))
    tokens = sum(s.prompt_tokens + s.completion_tokens for s in streams)
    median = statistics.median(gaps)
    return Result(
        undisturbed_gap_s=median,
        worst_gap_s=gaps[-1],
        p99_gap_s=gaps[max(0, math.ceil(0.99 * len(gaps)) - 1)],
        worst_over_undisturbed=gaps[-1] / median,
        long_ttft_s=max(s.ttft_s for s in streams),
        total_tok_s=tokens / took_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("servers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--words", type=int, default=900, help="about one token each")
    parser.add_argument("--new-tokens", type=int, default=120)
    parser.add_argument("--clients", type=int, help="measure throughput of this many")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, list[Result]] = {}
    # Servers take turns, so that a slow minute of the machine hits all of them.
    for repeat in range(options.repeats):
        for server in options.servers:
            name, _, url = server.partition("=")
            client = OpenAI(base_url=url, api_key="none", timeout=WAIT_S, max_retries=0)
            model = client.models.list().data[0].id
            seed = f"{time.time()}/{repeat}"
            if options.clients:
                result = measure_throughput(
                    client, model, options.clients, options.words, options.new_tokens, seed
                )
            else:
                result = measure_stall(
                    client, model, options.streams, options.words, options.new_tokens, seed
                )
            results.setdefault(name, []).append(result)
            print(f"{name} {repeat}: {result}", flush=True)
    show(results)
    if options.json:
        rows = {name: [asdict(r) for r in runs] for name, runs in results.items()}
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def show(results: dict[str, list[Result]]) -> None:
    """Print medians over the repeats, and each server against the first."""
    names = list(Result.__dataclass_fields__)
    medians = {
        server: {n: statistics.median(getattr(r, n) for r in runs) for n in names}
        for server, runs in results.items()
    }
    first = next(iter(medians.values()))
    width = max(map(len, names))
    print("".ljust(width), *(server.rjust(18) for server in medians))
    for name in names:
        cells = [
            f"{row[name]:8.3f} ({first[name] / row[name]:5.2f}x)".rjust(18)
            for row in medians.values()
        ]
        print(name.ljust(width), *cells)
    print("(…x): the first server's figure over this one's; medians of the repeats")


if __name__ == "__main__":
    main()
