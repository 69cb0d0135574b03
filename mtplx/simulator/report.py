"""Compares scheduling policies on one trace and says in text what each would do.

The body of the command ``mtplx simulate``: plain arguments in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import StepCost, read_step_cost
from mtplx.simulator.png import draw_png
from mtplx.simulator.simulation import Arrival, Simulation, read_trace, simulate
from mtplx.simulator.terminal import LEGEND, draw_text, view_of_interest


def compare_policies(
    *,
    budgets: Sequence[int] = (2048, 512),
    target_itl_ms: float | None = None,
    streams: int = 4,
    prompt_tokens: int = 6000,
    trace: Path | None = None,
    iteration_ms: float = 8.0,
    token_ms: float = 0.07,
    depth_ns: float = 0.0,
    fit: Path | None = None,
    max_num_seqs: int = 32,
    png: Path | None = None,
    width: int = 100,
) -> str:
    """Run each policy and return a table of gaps and TTFT, and the timelines.

    The policies: no chunking, each token budget alone, and the budget in time.

    Args:
        budgets: Token budgets of an iteration, in tokens.
        target_itl_ms: Target of the budget in time; None is the relative default.
        streams: Streams that decode when the long prompt comes.
        prompt_tokens: Length of that prompt.
        trace: JSON lines of arrivals, in place of the two before.
        iteration_ms: Cost of an iteration.
        token_ms: Cost of each token, decoded or prefilled.
        depth_ns: Cost of each pair of a token and a cached one before it.
        fit: A measured cost model, in place of the three before.
        max_num_seqs: Most requests that run.
        png: Where to draw the timelines, too.
        width: Columns of the timelines in the text.

    Raises:
        ConfigError: A value or a file cannot be used.
    """
    cost = _cost(iteration_ms, token_ms, depth_ns) if fit is None else read_step_cost(fit)
    if trace is not None:
        arrivals = read_trace(trace)
    else:
        arrivals = long_prompt_among_streams(cost, streams, prompt_tokens)
    longest = max((a.prompt_tokens for a in arrivals), default=1)
    policies = standard_policies(budgets, target_itl_ms, longest, max_num_seqs)
    runs = {name: simulate(config, cost, arrivals) for name, config in policies.items()}
    lines = [*_table(runs), "", LEGEND]
    views = [view_of_interest(run) for run in runs.values()]
    view_s = min(view[0] for view in views), max(view[1] for view in views)
    for name, run in runs.items():
        lines += ["", name, *draw_text(run, view_s=view_s, width=width)]
    if png is not None:
        draw_png(png, runs, view_s=view_s)
    return "\n".join(lines)


def long_prompt_among_streams(
    cost: StepCost, streams: int, prompt_tokens: int
) -> list[Arrival]:
    """Return a trace: streams decode, and after 30 steps a long prompt comes."""
    step_s = cost.iteration_s + cost.of_decode(streams, 64 * streams)
    running = [Arrival(0.0, prompt_tokens=32, new_tokens=400) for _ in range(streams)]
    return [*running, Arrival(30 * step_s, prompt_tokens, new_tokens=20)]


def standard_policies(
    budgets: Sequence[int],
    target_itl_ms: float | None,
    longest_prompt_tokens: int,
    max_num_seqs: int,
) -> dict[str, SchedulerConfig]:
    """Return the policies worth comparing, by name."""

    def tokens_only(budget: int, chunked: bool = True) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
            prefill_window=budget,
            relative_itl_target=None,
        )

    whole = max(longest_prompt_tokens, 16) + max_num_seqs
    policies = {"no chunking": tokens_only(whole, chunked=False)}
    policies |= {f"budget {budget}": tokens_only(budget) for budget in budgets}
    if target_itl_ms is None:
        name, target_s = "default target", None
    else:
        name, target_s = f"target {target_itl_ms:g} ms", target_itl_ms / 1e3
    policies[name] = SchedulerConfig(max_num_seqs=max_num_seqs, target_itl_s=target_s)
    return policies


def _cost(iteration_ms: float, token_ms: float, depth_ns: float) -> StepCost:
    return StepCost(
        iteration_s=iteration_ms / 1e3,
        decode_row_s=token_ms / 1e3,
        decode_depth_s=depth_ns / 1e9,
        span_token_s=token_ms / 1e3,
        span_depth_s=depth_ns / 1e9,
    )


def _table(runs: Mapping[str, Simulation]) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("policy", "gap p50", "gap p99", "worst", "TTFT p50", "TTFT longest", "refused")
    ]
    for name, run in runs.items():
        ttfts = sorted(r.ttft_s for r in run.served if r.ttft_s is not None)
        longest = max(run.served, key=lambda r: r.arrival.prompt_tokens, default=None)
        rows.append(
            (
                name,
                *(_ms(run.gap_s(share)) for share in (0.50, 0.99, 1.0)),
                _ms(ttfts[len(ttfts) // 2] if ttfts else None),
                _ms(longest.ttft_s if longest else None),
                str(sum(r.refusal is not None for r in run.served)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
