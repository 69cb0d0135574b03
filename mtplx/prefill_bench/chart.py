"""Draws measurements: rates over length, and TTFT cold against warm.

Needs Pillow, which only this module uses: ``pip install mtplx[plot]``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtplx.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_SIZE, _PANEL = (1600, 640), 700
_LEFT, _TOP, _HEIGHT = 90, 90, 430
_INK, _PALE, _RULE = "#222222", "#666666", "#dddddd"
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
_STYLES = {"cold": ("cold", 1), "memory": ("warm, memory", 8), "disk": ("warm, disk", 24)}
"""For each mode its name, and in how many pieces its lines are broken."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """Points in the order of their length, and what they are of; lines between them are
    drawn in so many pieces."""

    label: str
    colour: str
    pieces: int
    points: list[Point]


def draw_chart(path: Path, subjects: Sequence[dict[str, Any]], title: str) -> None:
    """Write the picture.

    Args:
        path: Where to write it.
        subjects: As a report holds them.
        title: Stands above.

    Raises:
        ConfigError: Pillow is not installed, or the file cannot be written.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ConfigError(
            "Drawing a chart needs Pillow. Run `pip install mtplx[plot]`, or leave --plot "
            "out."
        ) from None
    image = Image.new("RGB", _SIZE, "white")
    draw = ImageDraw.Draw(image)
    draw.font = ImageFont.load_default(size=16)
    draw.text((_LEFT, 16), title, fill=_INK)
    _panel(draw, _LEFT, "prefill tok/s over prompt tokens, cold", rate_lines(subjects))
    _panel(draw, _LEFT + 800, "TTFT in s over prompt tokens", ttft_lines(subjects))
    try:
        image.save(path, format="PNG")
    except OSError as error:
        raise ConfigError(f"The chart {path} cannot be written: {error}") from None


def rate_lines(subjects: Sequence[dict[str, Any]]) -> list[Line]:
    """Return the rate of cold prompts over their length, a line for each subject."""
    return [
        Line(subject["name"], colour, 1, _points(subject, "cold", "prefill_tok_s"))
        for subject, colour in zip(subjects, _repeated(len(subjects)), strict=True)
    ]


def ttft_lines(subjects: Sequence[dict[str, Any]]) -> list[Line]:
    """Return TTFT over length: cold, and dashed what was known before."""
    return [
        Line(f"{subject['name']}: {name}", colour, pieces, points)
        for subject, colour in zip(subjects, _repeated(len(subjects)), strict=True)
        for mode, (name, pieces) in _STYLES.items()
        if (points := _points(subject, mode, "ttft_s"))
    ]


def _points(subject: dict[str, Any], mode: str, field: str) -> list[Point]:
    return sorted(
        (row["prompt_tokens"], row[field])
        for row in subject["rows"]
        if row["mode"] == mode and row["prompt_tokens"] and row[field] is not None
    )


def _repeated(count: int) -> list[str]:
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _panel(draw: ImageDraw, left: int, title: str, lines: Sequence[Line]) -> None:
    width = _PANEL - _LEFT
    bottom = _TOP + _HEIGHT
    most_x = _round_up(max((x for line in lines for x, _ in line.points), default=1))
    most_y = _round_up(max((y for line in lines for _, y in line.points), default=1))

    def at(point: Point) -> Point:
        return (
            left + point[0] / most_x * width,
            bottom - point[1] / most_y * _HEIGHT,
        )

    draw.text((left, _TOP - 34), title, fill=_INK)
    for tick in range(6):
        x, y = at((most_x * tick / 5, most_y * tick / 5))
        draw.line((left, y, left + width, y), fill=_RULE)
        draw.text((left - 8, y), _short(most_y * tick / 5), fill=_PALE, anchor="rm")
        draw.text((x, bottom + 6), _short(most_x * tick / 5), fill=_PALE, anchor="ma")
    for number, line in enumerate(lines):
        places = [at(point) for point in line.points]
        for begin, end in itertools.pairwise(places):
            _stroke(draw, begin, end, line)
        for x, y in places:
            draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=line.colour)
        y = bottom + 34 + 20 * (number % 3)
        x = left + (number // 3) * width / 2
        _stroke(draw, (x, y + 9), (x + 28, y + 9), line)
        draw.text((x + 36, y), line.label, fill=_INK)


def _stroke(draw: ImageDraw, begin: Point, end: Point, line: Line) -> None:
    for piece in range(0, line.pieces, 2):
        from_, to = piece / line.pieces, (piece + 1) / line.pieces
        draw.line(
            (
                begin[0] + from_ * (end[0] - begin[0]),
                begin[1] + from_ * (end[1] - begin[1]),
                begin[0] + to * (end[0] - begin[0]),
                begin[1] + to * (end[1] - begin[1]),
            ),
            fill=line.colour,
            width=3,
        )


def _round_up(value: float) -> float:
    """Return the next number that five ticks divide well."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 1.5, 2, 2.5, 5, 10) if step * power >= value)


def _short(value: float) -> str:
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
