"""Measures prefill at growing context lengths, cold and warm.

A cold row reads a prompt that the bank has never seen. A warm row is the next turn of
it: the same prompt with its last tokens replaced, so that all but those are restored.
It runs the same ``PromptPrefill`` as the server, and like the server keeps the state
only after the first token is chosen. Runs on the thread that owns MLX.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mtplx import __version__
from mtplx.errors import InvalidRequestError
from mtplx.generation import PromptPrefill
from mtplx.generation.spans import DEFAULT_TAIL_GRID
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.types import Prompt

NEW_TURN_TOKENS = 32
"""Tokens of a warm prompt that the bank has not seen."""


@dataclass(frozen=True)
class LadderRow:
    """One length, cold or warm: medians over the repeats.

    Attributes:
        context_tokens: Length of the prompt.
        state: ``cold`` or ``warm``.
        cached_tokens: Restored from the bank.
        new_prefill_tokens: Computed.
        prefill_tok_s: Computed tokens over the wall time of the prefill.
        prefill_compute_tok_s: Computed tokens over the time in the model.
        ttft_s: Seconds until the first token is chosen.
        ttft_min_s, ttft_max_s: Extremes over the repeats.
        peak_bytes: Most memory MLX held, weights included.
        spans: Spans computed.
    """

    context_tokens: int
    state: Literal["cold", "warm"]
    cached_tokens: int
    new_prefill_tokens: int
    prefill_tok_s: float
    prefill_compute_tok_s: float
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    peak_bytes: int
    spans: int


def run_ladder(
    model: Model,
    contexts: Sequence[int],
    *,
    repeats: int = 3,
    window: int | None = None,
    tail_grid: int = DEFAULT_TAIL_GRID,
    on_run: Callable[[int, str], None] = lambda context, state: None,
) -> list[LadderRow]:
    """Measure each length cold and warm.

    Args:
        model: Measured.
        contexts: Prompt lengths in tokens.
        repeats: Runs for each row, after one that is not counted.
        window: Longest span in tokens; None takes the model's.
        tail_grid: Grid on which the tail is cut.
        on_run: Called after each counted run with its length and state.

    Raises:
        InvalidRequestError: A length does not fit the model.
    """
    for context in contexts:
        if not NEW_TURN_TOKENS < context < model.context_length:
            raise InvalidRequestError(
                f"A context must lie between {NEW_TURN_TOKENS + 1} and "
                f"{model.context_length - 1} tokens for {model.name}, not {context}."
            )
    _Runner(model, window, tail_grid).measure(min(contexts), seed=-1)
    rows = []
    for context in contexts:
        runner = _Runner(model, window, tail_grid)
        runs = []
        for repeat in range(repeats):
            runs.append(runner.measure(context, seed=repeat))
            for state in ("cold", "warm"):
                on_run(context, state)
        rows += [_median([cold for cold, _ in runs]), _median([warm for _, warm in runs])]
    return rows


def conditions(model: Model, **settings: Any) -> dict[str, Any]:
    """Describe machine, versions, model and settings, for a report that can be repeated."""
    return {
        "machine": {
            "system": platform.platform(),
            "processor": processor_name(),
            "device": model.device,
            "backend": model.backend,
        },
        "versions": {
            "python": platform.python_version(),
            "mtplx": __version__,
            **{name: version(name) for name in ("mlx", "mlx-lm")},
        },
        "model": asdict(model.info),
        "settings": settings,
    }


class _Runner:
    def __init__(self, model: Model, window: int | None, tail_grid: int) -> None:
        self._model = model
        self._window = window or model.prefill_window
        self._tail_grid = tail_grid

    def measure(self, context: int, *, seed: int) -> tuple[LadderRow, LadderRow]:
        """Run one prompt cold and its next turn warm."""
        draw = random.Random(f"{context}/{seed}").randrange
        vocabulary = self._model.vocab_size
        prompt = [draw(vocabulary) for _ in range(context)]
        turn = [draw(vocabulary) for _ in range(NEW_TURN_TOKENS)]
        stable = context - NEW_TURN_TOKENS
        bank = SessionBank(2 * context)
        cold = self._run(Prompt(tuple(prompt), (), stable), bank, "cold")
        warm = self._run(Prompt((*prompt[:stable], *turn), (), stable), bank, "warm")
        return cold, warm

    def _run(
        self, prompt: Prompt, bank: SessionBank, state: Literal["cold", "warm"]
    ) -> LadderRow:
        mx.reset_peak_memory()
        prefill = PromptPrefill(
            self._model,
            prompt,
            bank,
            arrival_s=time.perf_counter(),
            window=self._window,
            tail_grid=self._tail_grid,
        )
        prefill.run()
        assert prefill.cache.logits is not None
        mx.eval(mx.argmax(prefill.cache.logits))
        prefill.clock.first_token_s = time.perf_counter()
        peak_bytes = mx.get_peak_memory()
        prefill.store(prompt.token_ids)
        prefill.release()
        metrics = prefill.clock.metrics()
        assert metrics.ttft_s is not None
        return LadderRow(
            context_tokens=metrics.prompt_tokens,
            state=state,
            cached_tokens=metrics.cached_tokens,
            new_prefill_tokens=metrics.new_prefill_tokens,
            prefill_tok_s=metrics.prefill_tok_s or 0.0,
            prefill_compute_tok_s=metrics.prefill_compute_tok_s or 0.0,
            ttft_s=metrics.ttft_s,
            ttft_min_s=metrics.ttft_s,
            ttft_max_s=metrics.ttft_s,
            peak_bytes=peak_bytes,
            spans=metrics.prefill_chunks,
        )


def _median(rows: Sequence[LadderRow]) -> LadderRow:
    """Return one row for several runs of the same thing."""
    first = rows[0]
    assert {row.cached_tokens for row in rows} == {first.cached_tokens}
    times = [row.ttft_s for row in rows]
    return replace(
        first,
        prefill_tok_s=statistics.median(row.prefill_tok_s for row in rows),
        prefill_compute_tok_s=statistics.median(row.prefill_compute_tok_s for row in rows),
        ttft_s=statistics.median(times),
        ttft_min_s=min(times),
        ttft_max_s=max(times),
        peak_bytes=max(row.peak_bytes for row in rows),
    )


def processor_name() -> str:
    """Return what the CPU is called."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # Not Linux.
    return platform.processor() or platform.machine()
