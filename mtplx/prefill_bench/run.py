"""Measures cases, and makes rows of what was measured."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mtplx.errors import InvalidRequestError
from mtplx.prefill_bench.cases import Case, Mode
from mtplx.prefill_bench.targets import Sample, Target

SEED_TOKENS = 32
"""Tokens behind what is to be known, when it is read for the first time."""


@dataclass(frozen=True)
class Row:
    """A case in a mode: means over the repeats; None is what nobody told.

    Attributes:
        case: ``pp512@d8192`` say.
        mode: Of ``cases.Mode``.
        prompt_tokens, cached_tokens, new_prefill_tokens: Length of the prompt, restored
            and computed.
        cache_source: Where the restored tokens came from.
        prefill_tok_s: Computed tokens over TTFT. Restored ones are never in it.
        prefill_tok_s_spread: Standard deviation of it.
        prefill_compute_tok_s: Computed tokens over the time in the model.
        ttft_s: Seconds until the first token.
        ttft_spread_s: Standard deviation of it.
        ttft_min_s, ttft_max_s: Extremes of it.
        peak_bytes: Most memory that MLX held, weights included.
        worst_gap_s: Longest gap of the streams beside it.
        repeats: Runs that were counted.
    """

    case: str
    mode: Mode
    prompt_tokens: int | None
    cached_tokens: int | None
    new_prefill_tokens: int | None
    cache_source: str | None
    prefill_tok_s: float | None
    prefill_tok_s_spread: float | None
    prefill_compute_tok_s: float | None
    ttft_s: float
    ttft_spread_s: float
    ttft_min_s: float
    ttft_max_s: float
    peak_bytes: int | None
    worst_gap_s: float | None
    repeats: int


Measured = tuple[Sample, float | None]


def measure(
    target: Target,
    cases: Sequence[Case],
    modes: Sequence[Mode],
    *,
    repeats: int = 3,
    streams: int = 2,
    on_run: Callable[[Case, Mode], None] = lambda case, mode: None,
) -> list[Row]:
    """Measure each case in each mode that fits it, after one run that is not counted.

    Args:
        target: Measured.
        cases: What to read.
        modes: In which states.
        repeats: Runs for each row.
        streams: Streams beside a contended prompt.
        on_run: Called after each counted run.

    Raises:
        InvalidRequestError: A case does not fit the target, or no mode fits a case.
    """
    for case in cases:
        if not case.modes(modes):
            fitting = "memory, disk" if case.depth_tokens else "cold"
            raise InvalidRequestError(
                f"{case} can be measured in the modes {fitting} and contended; add one of "
                "them to --modes."
            )
        target.check(case.depth_tokens + max(case.new_tokens, SEED_TOKENS), modes)
    salt = secrets.token_hex(4)  # No server has seen these prompts.
    target.read(0, min(case.prompt_tokens for case in cases), known="", new=f"{salt}/warm")
    rows = []
    for case in cases:
        for mode in case.modes(modes):
            runs = []
            for run in _runs(target, case, mode, repeats, streams, f"{salt}/{mode}"):
                runs.append(run)
                on_run(case, mode)
            rows.append(_row(case, mode, runs))
    return rows


def _runs(
    target: Target, case: Case, mode: Mode, repeats: int, streams: int, salt: str
) -> Iterator[Measured]:
    depth, new = case.depth_tokens, case.new_tokens
    seeds = [f"{salt}/{case}/{number}" for number in range(repeats)]
    if depth:
        for seed in seeds:
            target.read(depth, SEED_TOKENS, known=f"{seed}/known", new=f"{seed}/before")
    if mode == "disk":
        target.restart()
    for seed in seeds:
        if mode != "contended":
            yield target.read(depth, new, known=f"{seed}/known", new=f"{seed}/new"), None
            continue
        with target.streams(streams, f"{seed}/stream") as running:
            begin_s = time.perf_counter()
            sample = target.read(depth, new, known=f"{seed}/known", new=f"{seed}/new")
            end_s = time.perf_counter()
        yield sample, running.worst_gap_s(begin_s, end_s)


def _row(case: Case, mode: Mode, runs: Sequence[Measured]) -> Row:
    samples = [sample for sample, _ in runs]
    ttfts_s = [sample.ttft_s for sample in samples]
    rates = [_rate(sample) for sample in samples]
    gaps_s = [gap_s for _, gap_s in runs if gap_s is not None]
    peaks = [sample.peak_bytes for sample in samples if sample.peak_bytes is not None]
    sources = {sample.cache_source for sample in samples}
    return Row(
        case=str(case),
        mode=mode,
        prompt_tokens=_whole([sample.prompt_tokens for sample in samples]),
        cached_tokens=_whole([sample.cached_tokens for sample in samples]),
        new_prefill_tokens=_whole([_new_tokens(sample) for sample in samples]),
        cache_source=sources.pop() if len(sources) == 1 else "mixed",
        prefill_tok_s=_mean(rates),
        prefill_tok_s_spread=_spread(rates),
        prefill_compute_tok_s=_mean([sample.compute_tok_s for sample in samples]),
        ttft_s=statistics.mean(ttfts_s),
        ttft_spread_s=_spread(ttfts_s) or 0.0,
        ttft_min_s=min(ttfts_s),
        ttft_max_s=max(ttfts_s),
        peak_bytes=max(peaks, default=None),
        worst_gap_s=max(gaps_s, default=None),
        repeats=len(runs),
    )


def _new_tokens(sample: Sample) -> int | None:
    if sample.prompt_tokens is None or sample.cached_tokens is None:
        return None
    return sample.prompt_tokens - sample.cached_tokens


def _rate(sample: Sample) -> float | None:
    new = _new_tokens(sample)
    return None if new is None else new / sample.ttft_s


def _known(values: Sequence[float | None]) -> list[float] | None:
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return None if known is None else statistics.mean(known)


def _whole(values: Sequence[int | None]) -> int | None:
    mean = _mean(values)
    return None if mean is None else round(mean)


def _spread(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    if known is None:
        return None
    return statistics.stdev(known) if len(known) > 1 else 0.0
