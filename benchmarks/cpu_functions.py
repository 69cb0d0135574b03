"""Attention and swiglu on the CPU: ours against MLX's, as a ratio in one run.

    python benchmarks/cpu_functions.py

Shapes are those of SmolLM2-135M: 9 heads, 3 for keys and values, of 64; a gate of 1536.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mtplx  # first: it makes MLX bind to a fast BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models import activations

from mtplx.models.cpu import attend, swiglu

CASES = ((1, 300), (1, 2000), (24, 450), (24, 900), (512, 0), (512, 512), (512, 4000))
REPEATS = 15


def seconds(compute: Callable[[], mx.array]) -> float:
    """Return the median time of a computation."""
    mx.eval(compute())
    times = []
    for _ in range(REPEATS):
        begin_s = time.perf_counter()
        mx.eval(compute())
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def main() -> None:
    mx.set_default_device(mx.cpu)
    print(f"mtplx {mtplx.__version__}, {mtplx.backend.BLAS.description}")
    print("queries  depth     MLX ms    ours ms   ratio")
    for length, depth in CASES:
        queries = mx.random.normal((1, 9, length, 64))
        keys, values = (mx.random.normal((1, 3, depth + length, 64)) for _ in range(2))
        mx.eval(queries, keys, values)
        mask = "causal" if length > 1 else None

        def library(q=queries, k=keys, v=values, mask=mask) -> mx.array:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)

        def ours(q=queries, k=keys, v=values, mask=mask) -> mx.array:
            return attend(q, k, v, None, 0.125, mask)

        theirs_s, ours_s = seconds(library), seconds(ours)
        print(
            f"{length:7d} {depth:6d} {theirs_s * 1e3:10.2f} {ours_s * 1e3:10.2f} "
            f"{theirs_s / ours_s:6.2f}x"
        )
    for length in (1, 24, 512):
        gate, x = (mx.random.normal((1, length, 1536)) for _ in range(2))
        mx.eval(gate, x)
        theirs_s = seconds(lambda g=gate, x=x: activations.swiglu(g, x))
        ours_s = seconds(lambda g=gate, x=x: swiglu(g, x))
        print(
            f"{length:7d} swiglu {theirs_s * 1e3:10.2f} {ours_s * 1e3:10.2f} "
            f"{theirs_s / ours_s:6.2f}x"
        )


if __name__ == "__main__":
    main()
