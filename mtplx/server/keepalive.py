"""Signs of life on a stream that has nothing to say.

A long prompt or a queue keeps a stream silent for minutes, and clients, proxies and
phones give up after less. While the frames of a stream fail to come, a beat goes out
every ``BEAT_S`` by the wall clock. It comes from the event loop, and the engine computes
on a thread of its own that can't hold the loop up. What a beat looks like is the route's
business; nothing is sent before its first frame, since some clients take what comes
first for the answer. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Literal

BEAT_S = 8.0
"""Clients are promised one in 10 seconds; a loaded machine may be late."""

_COMMENT = b": keep-alive\n\n"


async def keep_alive(
    frames: AsyncIterator[bytes],
    mode: Literal["comment", "event", "off"],
    event: Callable[[], bytes],
    *,
    interval_s: float = BEAT_S,
) -> AsyncGenerator[bytes]:
    """Yield ``frames``, and a beat whenever ``interval_s`` would pass without one.

    Ends and raises as ``frames`` does, which are iterated in a task of their own and
    cancelled when this iterator is closed.

    Args:
        frames: Server-sent events, complete ones.
        mode: As the setting `sse_keepalive`: a comment, which parsers skip, an event, for
            clients that count only these as life, or none.
        event: Returns a whole event of the route's API that says nothing.
        interval_s: Longest silence after the first frame.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[bytes | None] = asyncio.Queue()
    silent = False
    timer: asyncio.TimerHandle | None = None

    async def pump() -> None:
        async for each in frames:
            ready.put_nowait(each)

    def listen() -> None:
        # Twice in an interval, and silent is who said nothing since the last time: one
        # timer for a whole stream is far cheaper than one for each frame.
        nonlocal silent, timer
        if silent and ready.empty():
            ready.put_nowait(_COMMENT if mode == "comment" else event())
        silent = True
        timer = loop.call_later(interval_s / 2, listen)

    pumping = asyncio.create_task(pump())
    pumping.add_done_callback(lambda _: ready.put_nowait(None))
    try:
        while (frame := await ready.get()) is not None:
            yield frame
            silent = False
            if timer is None and mode != "off":
                listen()
        pumping.result()
    finally:
        if timer is not None:
            timer.cancel()
        pumping.cancel()
        # Whatever it ended with was told, or nobody asks for it any more.
        await asyncio.gather(pumping, return_exceptions=True)
