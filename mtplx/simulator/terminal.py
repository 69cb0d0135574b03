"""Draws a simulated timeline as lines of text: iterations above, streams below."""

from __future__ import annotations

from mtplx.simulator.simulation import Simulation

LEGEND = "iterations: ░ decode █ prefill   streams: · waits ▓ prefills | token _ no token"


def view_of_interest(simulation: Simulation) -> tuple[float, float]:
    """Return the time from just before the longest served prompt came to just after its
    first token, in seconds."""
    served = [request for request in simulation.served if request.ttft_s is not None]
    if not served:
        return 0.0, max(simulation.end_s, 1e-3)
    longest = max(served, key=lambda request: request.arrival.prompt_tokens)
    at_s, ttft_s = longest.arrival.at_s, longest.ttft_s or 0.0
    around_s = max(0.15 * ttft_s, 1e-3)
    return max(0.0, at_s - around_s), at_s + ttft_s + around_s


def draw_text(
    simulation: Simulation,
    *,
    view_s: tuple[float, float],
    width: int = 100,
    most_streams: int = 12,
) -> list[str]:
    """Return the lines of a timeline.

    Args:
        simulation: What to draw.
        view_s: Begin and end of the part to draw.
        width: Columns of the picture, without the labels.
        most_streams: Streams to draw; a last line says how many are left out.
    """
    begin_s, end_s = view_s
    column_s = (end_s - begin_s) / width

    def columns(from_s: float, to_s: float) -> range:
        """The columns that a stretch of time touches."""
        first = int((from_s - begin_s) / column_s)
        last = int((to_s - begin_s) / column_s)
        return range(max(0, first), min(width, last + 1))

    def paint(line: list[str], from_s: float, to_s: float, mark: str) -> None:
        for column in columns(from_s, to_s):
            line[column] = mark

    shown = [r for r in simulation.served if r.refusal is None and r.arrival.at_s < end_s]
    left_out = len(shown) - most_streams
    shown = shown[:most_streams]
    iterations = [" "] * width
    streams = {request.name: [" "] * width for request in shown}
    for request in shown:
        times = request.token_times_s
        line = streams[request.name]
        paint(line, request.arrival.at_s, times[0] if times else end_s, "·")
        if times:
            paint(line, times[0], times[-1], "_")
    for iteration in simulation.iterations:
        now_s = iteration.start_s + iteration.decode_s
        if iteration.decode_rows:
            paint(iterations, iteration.start_s, now_s, "░")
        for span, seconds in iteration.spans:
            paint(iterations, now_s, now_s + seconds, "█")
            if span.request_id in streams:
                paint(streams[span.request_id], now_s, now_s + seconds, "▓")
            now_s += seconds
    for request in shown:
        for at_s in request.token_times_s:
            paint(streams[request.name], at_s, at_s, "|")
    lines = [f"{'iterations':>12} {''.join(iterations)}"]
    for request in shown:
        label = f"{request.name} ({request.arrival.prompt_tokens})"
        lines.append(f"{label:>12} {''.join(streams[request.name])}")
    if left_out > 0:
        lines.append(f"{'':>12} and {left_out} more")
    lines.append(f"{'':>12} {_axis(begin_s, end_s, width)}")
    return lines


def _axis(begin_s: float, end_s: float, width: int) -> str:
    first, last = f"{begin_s * 1e3:.0f} ms", f"{end_s * 1e3:.0f} ms"
    return first + last.rjust(width - len(first))
