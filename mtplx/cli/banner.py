"""What a server says on the terminal once it can be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from mtplx.cli.options import console
from mtplx.types import ModelInfo

if TYPE_CHECKING:
    from mtplx.engine.memory import MemoryShares


def show_banner(
    url: str,
    info: ModelInfo,
    memory: MemoryShares,
    others: tuple[str, ...],
    keyed: bool,
) -> None:
    """Say what is served, with which memory, where, and what to try.

    Args:
        url: Where the server is reached from this machine.
        info, memory: Of the first model.
        others: Names of those that are loaded when they are asked for.
        keyed: Clients must send a key.
    """
    kinds = ", ".join(f"{count} {kind}" for kind, count in info.cache_kinds.items())
    rows = {
        "device": f"{info.device.upper()} ({info.backend}), {info.dtype}",
        "model": f"context {info.context_length:,} tokens, caches {kinds}",
        "memory": _memory(memory),
        "page": f"{url}/",
        "OpenAI": f"{url}/v1",
        "Anthropic": url,
    }
    if others:
        rows["models"] = f"{', '.join(others)} when asked for"
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    # Lines are left whole, for copying.
    console.print(f"[bold]{escape(info.name)}[/] is served.", soft_wrap=True)
    for name, told in rows.items():
        line = f"  [dim]{name:<9}[/] {escape(told)}"
        console.print(line, soft_wrap=True, highlight=False)
    console.print("Try it, or `mtplx chat`, or `mtplx connect CLIENT`:", highlight=False)
    console.print(
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d "
        """'{"messages": [{"role": "user", "content": "Hello"}]}'""",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    console.print("Ctrl-C ends it.")


def _memory(memory: MemoryShares) -> str:
    tokens = f", about {memory.kv_tokens:,} tokens" if memory.kv_tokens is not None else ""
    return (
        f"{_gib(memory.total_bytes)}, of it weights {_gib(memory.weight_bytes)}, KV state "
        f"up to {_gib(memory.kv_bytes)}{tokens}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 1024**3:.2f} GiB"
