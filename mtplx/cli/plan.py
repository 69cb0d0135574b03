"""``mtplx plan``: how a prompt would be split and what the bank would restore.

Nothing is computed. Prompts that came before are put into a bank with rows that weigh
nothing, so that what is shown is the decision of the very code that serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mtplx.cli.loading import load_with_progress
from mtplx.cli.options import (
    Adapter,
    ConfigFile,
    Device,
    Dtype,
    LogLevel,
    Model,
    PrefillWindow,
    TailGrid,
    configure,
)
from mtplx.cli.prompts import read_prompt
from mtplx.types import Prompt, StateKey

if TYPE_CHECKING:
    from mtplx.generation import PrefillPlan
    from mtplx.session import Match, SessionBank


def plan(
    prompt: Annotated[
        Path,
        typer.Argument(
            help="The prompt: a .json file with a list of messages (or a request body), "
            "or a text file."
        ),
    ],
    model: Model = None,
    after: Annotated[
        list[Path] | None,
        typer.Option(help="A prompt that was read before; may be given several times."),
    ] = None,
    adapter: Adapter = None,
    device: Device = None,
    dtype: Dtype = None,
    prefill_window: PrefillWindow = None,
    tail_grid: TailGrid = None,
    log_level: LogLevel = None,
    config: ConfigFile = None,
) -> None:
    """Show how a prompt would be split, and what would be restored."""
    settings = configure(
        config,
        model=model,
        adapter=adapter,
        device=device,
        dtype=dtype,
        prefill_window=prefill_window,
        tail_grid=tail_grid,
        log_level=log_level,
    ).settings

    from mtplx.generation import plan_prefill
    from mtplx.session import SessionBank
    from mtplx.text.tokenizer import Tokenizer

    loaded = load_with_progress(settings)
    tokenizer = Tokenizer(loaded.tokenizer)
    bank = SessionBank(settings.max_kv_size)
    window = settings.prefill_window or loaded.prefill_window

    def planned(rendered: Prompt) -> tuple[Match, PrefillPlan]:
        match = bank.match(loaded.state_key, rendered.token_ids)
        return match, plan_prefill(
            rendered,
            restored_tokens=match.length,
            any_prefix=loaded.state_key.any_prefix,
            window=window,
            tail_grid=settings.tail_grid,
        )

    for earlier in after or []:
        rendered = read_prompt(earlier, tokenizer)
        _pretend_to_store(bank, loaded.state_key, rendered, planned(rendered)[1])
    rendered = read_prompt(prompt, tokenizer)
    match, decided = planned(rendered)
    _show(rendered, match, decided, loaded.name)


@dataclass(frozen=True)
class _Weightless:
    """Stands for state in a dry run: rows, what holds them, and snapshots."""

    length: int = 0
    nbytes: int = 0
    start: int = 0

    def __len__(self) -> int:
        return self.length

    @property
    def buffer(self) -> _Weightless:
        return self

    def slice(self, start: int, end: int) -> _Weightless:
        return _Weightless(end - start)

    def copy(self, start: int, end: int) -> _Weightless:
        return _Weightless(end - start)


def _pretend_to_store(
    bank: SessionBank, key: StateKey, prompt: Prompt, decided: PrefillPlan
) -> None:
    bank.store(
        key,
        prompt.token_ids,
        lambda start, end: _Weightless(end - start),
        {index: _Weightless() for index in decided.snapshots},
    )


def _show(prompt: Prompt, match: Match, decided: PrefillPlan, model_name: str) -> None:
    total = decided.prompt_tokens
    out = Console()
    out.print(f"{model_name}: a prompt of {total} tokens.")
    if match.length:
        out.print(f"Restored: {match.length}. Computed: {total - match.length}.")
    else:
        out.print(f"Restored: none ({match.miss_reason}). Computed: {total}.")
    out.print(
        f"Edges: {', '.join(map(str, prompt.edges)) or 'none'}. "
        f"Stable prefix: {prompt.stable_prefix_len}."
    )
    table = Table()
    for heading in ("span", "start", "end", "tokens"):
        table.add_column(heading, justify="right")
    table.add_column("kept at its end")
    for number, span in enumerate(decided.spans, 1):
        table.add_row(
            "tail" if span.is_tail else str(number),
            str(span.start),
            str(span.end),
            str(span.end - span.start),
            "snapshot" if span.end in decided.snapshots else "",
        )
    out.print(table)
