"""What ``mtplx top`` shows: the events of ``GET /v1/live`` as they add up, drawn."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

WINDOW_S = 30.0
RATE_S = 5.0
_READ, _TOKEN, _KEPT, _LATE = "yellow", "blue", "cyan", "red"
_STRIP = 40

Event = dict[str, Any]


@dataclass
class Stream:
    """A request that waits, runs, or ran in the last half minute."""

    prompt_tokens: int = 0
    read_tokens: int = 0
    cached_tokens: int | None = None
    seen_s: float = 0.0
    gaps: deque[tuple[float, float, bool]] = field(default_factory=deque)
    spans: deque[tuple[float, float]] = field(default_factory=deque)
    outcome: str | None = None

    @property
    def state(self) -> str:
        if self.outcome is not None:
            return "done" if self.outcome == "stop" else self.outcome
        if self.gaps or (self.read_tokens and self.read_tokens == self.prompt_tokens):
            return "answering"
        if self.read_tokens:
            return f"reading {100 * self.read_tokens // max(self.prompt_tokens, 1)} %"
        return "waiting"


class Watched:
    """All that is known of a server.

    Args:
        title: What it is called.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.engine: Event | None = None
        self.nodes: list[Event] = []
        self.left_out = 0
        self.streams: dict[str, Stream] = {}
        self.iterations: deque[Event] = deque()
        self.requests: deque[Event] = deque(maxlen=50)
        self._ahead_s = 0.0

    @property
    def now_s(self) -> float:
        """Now, on the server's clock."""
        return time.monotonic() + self._ahead_s

    def take(self, event: Event) -> None:
        """Add an event."""
        self._ahead_s = event["now_s"] - time.monotonic()
        match event["type"]:
            case "state":
                self.engine = event["engine"]
                for request in event["open"]:
                    stream = self._stream(request["id"])
                    stream.prompt_tokens = request["prompt_tokens"]
                    stream.seen_s = event["now_s"]
            case "bank":
                self.nodes = event["bank"]["nodes"]
                self.left_out = event["bank"]["left_out"]
            case "requests":
                for request in event["requests"]:
                    self.requests.appendleft(request)
                    if request["id"] in self.streams:
                        self.streams[request["id"]].outcome = request["outcome"]
            case "iterations":
                for iteration in event["iterations"]:
                    self._add(iteration)
        self._forget()

    def rates(self) -> tuple[float, float]:
        """Return tokens answered and tokens read, both a second, over the last few."""
        since_s = self.now_s - RATE_S
        recent = [i for i in self.iterations if i["begin_s"] + i["took_s"] >= since_s]
        read = sum(
            span["end"] - span["start"]
            for iteration in recent
            for span in iteration["spans"]
            if span["seconds"] is not None
        )
        return sum(len(i["decoding"]) for i in recent) / RATE_S, read / RATE_S

    def _stream(self, name: str) -> Stream:
        return self.streams.setdefault(name, Stream(seen_s=self.now_s))

    def _add(self, iteration: Event) -> None:
        self.iterations.append(iteration)
        target_s = iteration["target_s"]
        at_s = iteration["begin_s"] + (iteration["decode_s"] or 0.0)
        for name, gap_s in zip(iteration["decoding"], iteration["gaps_s"], strict=True):
            stream = self._stream(name)
            stream.seen_s = at_s
            if gap_s is not None:
                late = target_s is not None and gap_s > target_s
                stream.gaps.append((at_s, gap_s, late))
        for span in iteration["spans"]:
            if span["seconds"] is None:
                continue
            stream = self._stream(span["request_id"])
            if stream.cached_tokens is None and not stream.read_tokens:
                stream.cached_tokens = span["start"]
            begin_s = iteration["begin_s"] if span["shared"] else at_s
            at_s += span["seconds"]
            stream.spans.append((begin_s, at_s))
            stream.read_tokens = span["end"]
            stream.prompt_tokens = max(stream.prompt_tokens, span["end"])
            stream.seen_s = at_s

    def _forget(self) -> None:
        since_s = self.now_s - WINDOW_S
        while self.iterations and self.iterations[0]["begin_s"] < since_s:
            self.iterations.popleft()
        for name, stream in [*self.streams.items()]:
            while stream.gaps and stream.gaps[0][0] < since_s:
                stream.gaps.popleft()
            while stream.spans and stream.spans[0][1] < since_s:
                stream.spans.popleft()
            if stream.seen_s < since_s:
                del self.streams[name]


def draw(watched: Watched, width: int, height: int) -> RenderableType:
    """Return the whole view for a terminal of this size."""
    if watched.engine is None:
        return Text(f"{watched.title}: waiting for its first word.")
    # What is most asked for stands first; the tree gets what is left of the height.
    streams = [*watched.streams.items()][-max(height // 4, 1) :]
    requests = [*watched.requests][: max(height // 5, 1)]
    left = height - 9 - len(streams) - 2 * len(requests)
    return Group(
        _head(watched),
        _memory(watched.engine, width),
        Text(),
        _streams(watched, streams),
        Text(),
        _requests(requests, watched.now_s),
        Text(),
        _tree(watched, max(left, 1)),
    )


def _head(watched: Watched) -> Text:
    engine = watched.engine or {}
    answered, read = watched.rates()
    gaps = [gap for stream in watched.streams.values() for _, gap, _ in stream.gaps]
    target_s = engine["itl"]["target_s"]
    told = Text(watched.title, style="bold", no_wrap=True, overflow="ellipsis")
    told.append("   q ends\n", style="dim")
    told.append(f"{engine['running']} running, {engine['waiting']} waiting", style="bold")
    told.append(f" · {answered:.1f} tok/s answered · {read:.1f} tok/s read")
    if gaps:
        aimed = "" if target_s is None else f", target {_seconds(target_s)}"
        told.append(f" · worst gap {_seconds(max(gaps))}{aimed}")
    return told


def _memory(engine: Event, width: int) -> Text:
    held, used = engine["bank_bytes"], engine["kv_running_bytes"]
    limit = engine["kv_limit_bytes"]
    room = max(min(width - 60, 40), 10)
    whole = max(limit or held, held, 1)
    cells = [round(room * part / whole) for part in (used, held - used)]
    told = Text("KV state ", no_wrap=True, overflow="ellipsis")
    told.append("█" * cells[0], style=_READ)
    told.append("█" * cells[1], style=_KEPT)
    told.append("░" * max(room - sum(cells), 0), style="dim")
    of = "no limit" if limit is None else f"of {_bytes(limit)}"
    told.append(f" {_bytes(used)} in use, {_bytes(held - used)} kept, {of}")
    return told


def _streams(watched: Watched, streams: list[tuple[str, Stream]]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("stream", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for heading in ("prompt", "cached", "gap", "worst", "late"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"last {WINDOW_S:.0f} s", no_wrap=True)
    for name, stream in streams:
        gaps = [gap for _, gap, _ in stream.gaps]
        table.add_row(
            name[:4],
            stream.state,
            f"{stream.prompt_tokens:,}",
            "–" if stream.cached_tokens is None else f"{stream.cached_tokens:,}",
            _seconds(gaps[-1] if gaps else None),
            _seconds(max(gaps, default=None)),
            str(sum(late for *_, late in stream.gaps)),
            _strip(stream, watched.now_s),
        )
    return table if streams else Text("No streams in the last half minute.", style="dim")


def _strip(stream: Stream, now_s: float) -> Text:
    """Draw what happened to a stream, a cell for each moment."""
    cells = [(" ", "")] * _STRIP

    def cell(at_s: float) -> int:
        return int(_STRIP * (1 - (now_s - at_s) / WINDOW_S))

    for begin_s, end_s in stream.spans:
        for index in range(max(cell(begin_s), 0), min(cell(end_s) + 1, _STRIP)):
            cells[index] = ("█", _READ)
    for at_s, _, late in stream.gaps:
        if (index := min(cell(at_s), _STRIP - 1)) >= 0 and cells[index][1] != _LATE:
            cells[index] = ("┃", _LATE if late else _TOKEN)
    return Text.assemble(*cells)


def _requests(requests: list[Event], now_s: float) -> RenderableType:
    told = Text(no_wrap=True, overflow="ellipsis")
    for request in requests:
        told.append(f"{request['id'][:4]} ", style="bold")
        ago_s = max(now_s - request["end_s"], 0.0)
        parts = [f"{request['outcome']}, {ago_s:.0f} s ago"]
        if "prompt_tokens" in request:
            cached, new = request["cached_tokens"], request["new_prefill_tokens"]
            parts.append(f"{cached:,} cached, {new:,} new")
            parts.append(f"first token after {_seconds(request['ttft_s'])}")
        parts.append(f"{request['completion_tokens']:,} tokens")
        told.append(" · ".join(parts) + "\n")
        told.append(f"     {request.get('why', 'It had not been read.')}\n", style="dim")
    return told if requests else Text("No requests yet.", style="dim")


def _tree(watched: Watched, most: int) -> RenderableType:
    told = Text("What is kept\n", style="dim", no_wrap=True, overflow="ellipsis")
    depths: list[int] = []
    for node in watched.nodes[:most]:
        parent = node["parent"]
        # What alone goes on from it stands below it, and only branches are moved in.
        depth = 0
        if parent is not None:
            depth = depths[parent] + (watched.nodes[parent]["children"] > 1)
        depths.append(depth)
        told.append("  " * depth + ("└ " if parent is not None else ""), style="dim")
        told.append(f"{node['start']:,}–{node['end']:,}", style=_KEPT)
        told.append(f" {_bytes(node['bytes'])}, restored {node['uses']} times")
        if node["text"] is not None:
            told.append(f"  {' '.join(node['text'].split())}", style="dim")
        told.append("\n")
    more = len(watched.nodes) - most + watched.left_out
    if more > 0:
        told.append(f"and {more:,} more", style="dim")
    return told if watched.nodes else Text("Nothing is kept yet.", style="dim")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
