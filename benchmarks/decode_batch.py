"""Times one decode step of several requests, in every way it can be done.

    python benchmarks/decode_batch.py demo --depths 512 512 512 8192

Each number in ``--depths`` is one request with so many tokens in its cache. The ways
take turns, so that a busy machine slows all of them; the table shows the fastest step,
and ratios to the first line. Runs on the main thread, which owns MLX here.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import mtplx  # noqa: F401  Before MLX, so that MLX finds OpenBLAS.

# isort: split
import mlx.core as mx

from mtplx.models import Model
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache
from mtplx.models.runner import BatchMode

TOKEN = 40


def filled(model: Model, depths: list[int]) -> list[PromptCache]:
    """Return a cache of each depth; the prompts are prefixes of one another."""
    cache = model.new_cache()
    by_depth: dict[int, PromptCache] = {}
    for depth in sorted(set(depths)):
        while cache.offset < depth:
            span = range(cache.offset, min(cache.offset + model.prefill_window, depth))
            model.prefill(cache, [TOKEN + index % 1000 for index in span])
        by_depth[depth] = copy.deepcopy(cache)
    return [copy.deepcopy(by_depth[depth]) for depth in depths]


def ours(
    model: Model, caches: list[PromptCache], *, mode: BatchMode, together: bool
) -> Callable[[], None]:
    decoder = BatchDecoder(model)
    decoder._runner.mode = mode
    decoder.seating.holds = lambda nbytes: together
    caches = copy.deepcopy(caches)

    def step() -> None:
        assert not decoder.decode(caches, [TOKEN] * len(caches))

    return step


def padded_batch(model: Model, caches: list[PromptCache]) -> Callable[[], None]:
    """mlx-lm's way: one padded cache for all, joined once before the first step."""
    rows = zip(*(cache.layers for cache in caches), strict=True)
    layers: list[Any] = [type(row[0]).merge(list(row)) for row in rows]
    mx.eval([layer.state for layer in layers])

    def step() -> None:
        logits = model.network(mx.array([[TOKEN]] * len(caches)), cache=layers)
        mx.eval(logits, [layer.state for layer in layers])

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--depths", type=int, nargs="+", default=[512] * 4)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    model = Model.load(options.model)
    begin_s = time.perf_counter()
    mode = BatchDecoder(model).mode
    print(f"{model.name}: mode {mode}, chosen in {time.perf_counter() - begin_s:.2f} s")
    caches = filled(model, options.depths)
    ways = {
        "those of like length together": ours(model, caches, mode=mode, together=True),
        f"each apart ({mode})": ours(model, caches, mode=mode, together=False),
        "each apart, a forward each": ours(model, caches, mode="rows", together=False),
        "mlx-lm batch cache": padded_batch(model, caches),
    }
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        step()  # Gives shared buffers memory of their own.
    for _ in range(options.steps):
        for name, step in ways.items():
            begin_s = time.perf_counter()
            step()
            times_s[name].append(time.perf_counter() - begin_s)
    base_s = min(next(iter(times_s.values())))
    print(f"{'depths ' + str(options.depths):<60}{'ms':>8}{'ratio':>8}")
    for name, times in times_s.items():
        print(f"{name:<60}{min(times) * 1e3:>8.1f}{min(times) / base_s:>8.2f}")


if __name__ == "__main__":
    main()
