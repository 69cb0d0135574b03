"""Draws simulated timelines to one PNG, one panel for each policy on one scale of time.

Needs Pillow, which only this module uses: ``pip install mtplx[plot]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtplx.errors import ConfigError
from mtplx.simulator.simulation import Simulation

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_WIDTH, _LEFT, _RIGHT = 1600, 130, 50
_TITLE, _LANE, _GAP, _AXIS = 34, 26, 6, 34
_INK, _PALE, _RULE = "#222222", "#666666", "#dddddd"
_DECODE, _PREFILL, _WAIT, _TOKEN = "#4c78a8", "#f58518", "#eeeeee", "#2b5f94"


def draw_png(
    path: Path,
    simulations: Mapping[str, Simulation],
    *,
    view_s: tuple[float, float],
    most_streams: int = 8,
) -> None:
    """Write the picture.

    Args:
        path: Where to write it.
        simulations: A run for each policy, by name.
        view_s: Begin and end of the part to draw.
        most_streams: Streams to draw in each panel.

    Raises:
        ConfigError: Pillow is not installed, or the file cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ConfigError(
            "Drawing a PNG needs Pillow. Run `pip install mtplx[plot]`, or leave the PNG "
            "out and read the timeline in the terminal."
        ) from None
    streams = {
        name: [r for r in run.served if r.refusal is None][:most_streams]
        for name, run in simulations.items()
    }
    heights = [_panel_height(len(shown)) for shown in streams.values()]
    image = Image.new("RGB", (_WIDTH, sum(heights)), "white")
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(size=14)
    top = 0
    for (name, run), height in zip(simulations.items(), heights, strict=True):
        _draw_panel(draw, top, name, run, [r.name for r in streams[name]], view_s)
        top += height
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise ConfigError(f"The picture {path} cannot be written: {error}") from None


def _panel_height(streams: int) -> int:
    return _TITLE + (streams + 1) * (_LANE + _GAP) + _AXIS


def _draw_panel(
    draw: ImageDraw,
    top: int,
    name: str,
    run: Simulation,
    shown: list[str],
    view_s: tuple[float, float],
) -> None:
    begin_s, end_s = view_s
    right = _WIDTH - _RIGHT

    def x(at_s: float) -> float:
        share = (at_s - begin_s) / (end_s - begin_s)
        return _LEFT + min(max(share, 0.0), 1.0) * (right - _LEFT)

    def visible(from_s: float, to_s: float) -> bool:
        return to_s >= begin_s and from_s <= end_s

    def box(lane: int, from_s: float, to_s: float, colour: str) -> None:
        if visible(from_s, to_s):
            y = lanes + lane * (_LANE + _GAP)
            draw.rectangle((x(from_s), y, max(x(from_s), x(to_s) - 1), y + _LANE), colour)

    lanes = top + _TITLE
    lane_of = {request_id: i for i, request_id in enumerate(shown, 1)}
    worst_s = run.gap_s(1.0)
    worst = "" if worst_s is None else f": worst gap {worst_s * 1e3:.0f} ms"
    title = f"{name}{worst}   (blue: decode and tokens, orange: prefill, grey: waits)"
    draw.text((_LEFT, top + 10), title, fill=_INK)
    bottom = lanes + (len(shown) + 1) * (_LANE + _GAP)
    for tick in range(11):
        at_s = begin_s + tick * (end_s - begin_s) / 10
        draw.line((x(at_s), lanes, x(at_s), bottom), fill=_RULE)
        draw.text((x(at_s), bottom + 4), f"{at_s * 1e3:.0f} ms", fill=_PALE, anchor="ma")
    draw.text((_LEFT - 8, lanes + 5), "iterations", fill=_INK, anchor="ra")
    for request in run.served:
        if (lane := lane_of.get(request.name)) is None:
            continue
        y = lanes + lane * (_LANE + _GAP)
        label = f"{request.name} ({request.arrival.prompt_tokens})"
        draw.text((_LEFT - 8, y + 5), label, fill=_INK, anchor="ra")
        first_s = request.token_times_s[0] if request.token_times_s else end_s
        box(lane, request.arrival.at_s, first_s, _WAIT)
    for iteration in run.iterations:
        now_s = iteration.start_s + iteration.decode_s
        if iteration.decode_rows:
            box(0, iteration.start_s, now_s, _DECODE)
        for span, seconds in iteration.spans:
            box(0, now_s, now_s + seconds, _PREFILL)
            if (lane := lane_of.get(span.request_id)) is not None:
                box(lane, now_s, now_s + seconds, _PREFILL)
            now_s += seconds
    for request in run.served:
        if (lane := lane_of.get(request.name)) is not None:
            for at_s in request.token_times_s:
                box(lane, at_s, at_s, _TOKEN)
