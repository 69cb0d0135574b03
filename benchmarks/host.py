"""The host's work in a decode step, ours beside mlx-lm's, in turns in one process.

    python benchmarks/host.py --kinds llama sliding hybrid --rows 1 8 32 --depths 32 2048
    python benchmarks/host.py --http --clients 1 8

Networks with hardly any weights (``host_models.py``), so that little but the host's work
is left. Ours is a whole iteration of the engine: schedule, forward, sampling, text,
events. mlx-lm's is ``generate_step`` for one row and ``BatchGenerator`` for more. Steps
take turns, so that a busy machine slows both; each figure is the median of all steps.
``--parts`` also says where our time goes. ``--http`` compares tokens a second with
``mlx_lm.server``, both started here on free ports.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from host_models import CONFIGS, make_network, make_tokenizer, write_model

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import GenerationRequest, Prompt, SamplingParams, TextDelta

SETTLING_STEPS = 12
WAIT_S = 120


def prompt(depth: int, row: int) -> list[int]:
    """Return token ids, other ones for each row."""
    return [(7 * index + 31 * row + index // 50) % 900 + 5 for index in range(depth)]


# -- in process -----------------------------------------------------------------


class Parts:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count the time of a method; what it calls that is watched too counts there."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **more: Any) -> Any:
            begin_s, others_s = time.perf_counter(), sum(self.seconds.values())
            try:
                return inner(*arguments, **more)
            finally:
                took_s = time.perf_counter() - begin_s
                self.seconds[name] += took_s - sum(self.seconds.values()) + others_s

        setattr(owner, method, timed)


def ours(
    model: Model, rows: int, depth: int, temperature: float, parts: Parts | None
) -> Callable[[], None]:
    """Return a step of our engine with that many streams at a depth."""
    settings = Settings(max_num_seqs=max(rows, 2), prefill_window=2048)
    core = EngineCore(model, Tokenizer(model.tokenizer), SessionBank(), settings)
    streaming = set()
    for row in range(rows):

        def heard(event: object, row: int = row) -> None:
            if isinstance(event, TextDelta):
                streaming.add(row)

        core.add(
            GenerationRequest(
                request_id=str(row),
                prompt=Prompt(tuple(prompt(depth, row))),
                max_new_tokens=4096,
                arrival_s=time.perf_counter(),
                sampling=SamplingParams(temperature=temperature),
                ignore_eos=True,
            ),
            heard,
        )
    while len(streaming) < rows:
        core.iterate()
    if parts is not None:
        parts.watch(core.scheduler, "schedule", "schedule")
        parts.watch(core.scheduler, "apply", "schedule")
        parts.watch(core.decoder, "begin", "build")
        parts.watch(core._stepper, "_draw", "sample")
        parts.watch(core._stepper, "_read", "wait for the device")
        for running in core._running.values():
            parts.watch(running._text, "push", "detokenize")
            parts.watch(running, "_on_event", "events")
            parts.watch(running, "accept", "accept")
        for name in ("store", "reserve", "acquire"):
            parts.watch(core._bank, name, "bank")
        parts.watch(core, "iterate", "rest")
    return core.iterate


def theirs(network: Any, rows: int, depth: int) -> Callable[[], None]:
    """Return a step of mlx-lm with that many streams at a depth."""
    if rows == 1:
        cache = make_prompt_cache(network)
        steps = generate_step(
            mx.array(prompt(depth, 0)), network, prompt_cache=cache, max_tokens=4096
        )
        return lambda: next(steps) and None
    generator = BatchGenerator(network, max_tokens=4096, completion_batch_size=max(rows, 8))
    generator.insert([prompt(depth, row) for row in range(rows)])
    answers = 0
    while answers < rows:
        answers = len(generator.next()[1])
    return lambda: generator.next() and None


def compare(
    kind: str, rows: int, depth: int, steps: int, temperature: float, *, parts: bool
) -> float:
    """Time both in turns, print a line, and return our time over theirs."""
    network = make_network(kind)
    model = Model(network, CONFIGS[kind], make_tokenizer(), name=kind, traces=True)
    watched = Parts() if parts else None
    sides = {
        "ours": ours(model, rows, depth, temperature, watched),
        "mlx-lm": theirs(network, rows, depth),
    }
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(SETTLING_STEPS + steps):
        if watched is not None and number == SETTLING_STEPS:
            watched.seconds.clear()
        for name, step in sides.items():
            begin_s = time.perf_counter()
            step()
            if number >= SETTLING_STEPS:
                times_s[name].append(time.perf_counter() - begin_s)
    our_s, their_s = (statistics.median(times_s[name]) for name in sides)
    print(
        f"{kind:8} {rows:4} rows  depth {depth:5}  ours {our_s * 1e3:7.2f} ms  "
        f"mlx-lm {their_s * 1e3:7.2f} ms  ratio {our_s / their_s:5.2f}",
        flush=True,
    )
    if watched is not None:
        for name, seconds in sorted(watched.seconds.items(), key=lambda pair: -pair[1]):
            print(f"    {name:20} {seconds / steps * 1e3:7.3f} ms a step")
    return our_s / their_s


# -- over HTTP ------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextlib.contextmanager
def served(command: list[str], port: int) -> Iterator[str]:
    """Run a server; give its URL once it answers."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        begin_s = time.perf_counter()
        while True:
            assert process.poll() is None, f"{command} ended"
            assert time.perf_counter() - begin_s < WAIT_S
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def tokens_per_second(
    url: str, model: str, clients: int, new_tokens: int, seed: int
) -> float:
    """Let clients stream completions at once."""
    counts = [0] * clients

    def run(number: int) -> None:
        body = {
            "model": model,
            "prompt": f"{seed} {number} " + "abc " * 10,
            "max_tokens": new_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=WAIT_S
        ) as response:
            for line in response.iter_lines():
                if '"completion_tokens":' in line.replace(" ", ""):
                    text = line.replace(" ", "").split('"completion_tokens":')[1]
                    counts[number] = int("".join(c for c in text[:6] if c.isdigit()))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    begin_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(counts), counts
    return sum(counts) / (time.perf_counter() - begin_s)


def over_http(kind: str, clients: list[int], new_tokens: int, repeats: int) -> list[float]:
    """Print tokens a second of both servers; return theirs over ours."""
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / kind
        write_model(kind, folder)
        ports = free_port(), free_port()
        start = "import sys, mtplx.backend; from {0} import main; sys.exit(main())"
        commands = {
            "ours": [
                *(sys.executable, "-c", start.format("mtplx.cli.main"), "serve"),
                *(str(folder), "--port", str(ports[0])),
            ],
            "mlx_lm.server": [
                *(sys.executable, "-c", start.format("mlx_lm.server")),
                *("--model", str(folder), "--port", str(ports[1])),
            ],
        }
        with contextlib.ExitStack() as stack:
            urls = {
                name: stack.enter_context(served(command, port))
                for (name, command), port in zip(commands.items(), ports, strict=True)
            }
            names = {"ours": kind, "mlx_lm.server": "default_model"}
            for count in clients:
                rates: dict[str, list[float]] = {name: [] for name in urls}
                for repeat in range(repeats + 1):
                    for name, url in urls.items():
                        seed = 100 * count + repeat
                        rate = tokens_per_second(url, names[name], count, new_tokens, seed)
                        if repeat:  # The first one warms up.
                            rates[name].append(rate)
                ours_, theirs_ = (statistics.median(rates[name]) for name in urls)
                ratios.append(theirs_ / ours_)
                print(
                    f"{kind:8} {count:4} clients  ours {ours_:7.1f} tok/s  "
                    f"mlx_lm.server {theirs_:7.1f} tok/s  ratio {ours_ / theirs_:5.2f}",
                    flush=True,
                )
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--depths", type=int, nargs="+", default=[32, 2048])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--parts", action="store_true", help="say where our time goes")
    parser.add_argument("--http", action="store_true", help="compare servers instead")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for kind in options.kinds:
        if options.http:
            over_http(kind, options.clients, options.new_tokens, options.repeats)
            continue
        for depth in options.depths:
            for rows in options.rows:
                compare(
                    kind,
                    rows,
                    depth,
                    options.steps,
                    options.temperature,
                    parts=options.parts,
                )


if __name__ == "__main__":
    main()
