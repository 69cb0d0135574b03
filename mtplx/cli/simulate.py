"""``mtplx simulate``: what each scheduling policy would do to gaps and TTFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mtplx.errors import ConfigError


def simulate(
    budgets: Annotated[
        str, typer.Option(help="Token budgets of an iteration to compare.")
    ] = "2048,512",
    target_itl_ms: Annotated[
        float | None,
        typer.Option(help="Token-gap target in ms (default: the server's relative one)."),
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, help="Streams that run when the long prompt comes.")
    ] = 4,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Length of the long prompt, in tokens.")
    ] = 6000,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Arrivals instead, a JSON object a line: at_s, prompt_tokens, "
            "new_tokens, cached_tokens."
        ),
    ] = None,
    iteration_ms: Annotated[float, typer.Option(min=0, help="Cost of an iteration.")] = 8.0,
    token_ms: Annotated[float, typer.Option(min=0, help="Cost of each token.")] = 0.07,
    depth_ns: Annotated[
        float, typer.Option(min=0, help="Cost of each token and cached token before it.")
    ] = 0.0,
    fit: Annotated[
        Path | None,
        typer.Option(help="A measured cost instead: `engine.step_cost` of /health."),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Most requests that run at once.")
    ] = 32,
    png: Annotated[Path | None, typer.Option(help="Draw the timelines here too.")] = None,
) -> None:
    """Compare scheduling policies with the server's own scheduler, computing nothing."""
    from mtplx.simulator.report import compare_policies

    console = Console()
    try:
        tokens = [int(word) for word in budgets.split(",")]
    except ValueError:
        raise ConfigError(
            f"--budgets cannot be {budgets!r}. Write numbers, such as 2048,512."
        ) from None
    report = compare_policies(
        budgets=tokens,
        target_itl_ms=target_itl_ms,
        streams=streams,
        prompt_tokens=prompt_tokens,
        trace=trace,
        iteration_ms=iteration_ms,
        token_ms=token_ms,
        depth_ns=depth_ns,
        fit=fit,
        max_num_seqs=max_num_seqs,
        png=png,
        width=min(console.width, 120),
    )
    console.print(report, markup=False, highlight=False, soft_wrap=True)
