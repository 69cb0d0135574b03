"""A silent stream shows life, whatever the engine's thread does, and adds nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

import pytest

from mtplx.server.keepalive import keep_alive

COMMENT, PING = b": keep-alive\n\n", b"event: ping\n\n"
SOON_S = 0.001


async def stream(
    *steps: bytes | Callable[[], Awaitable[object]],
) -> AsyncGenerator[bytes]:
    for step in steps:
        if isinstance(step, bytes):
            yield step
        else:
            await step()


async def collect(frames: AsyncIterator[bytes]) -> list[bytes]:
    return [frame async for frame in frames]


@pytest.mark.parametrize("mode", ["comment", "event", "off"])
def test_a_stream_that_keeps_talking_is_left_alone(mode: str) -> None:
    beats = keep_alive(stream(b"a", b"b", b"c"), mode, lambda: PING, interval_s=60)  # type: ignore[arg-type]
    assert asyncio.run(collect(beats)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("mode", "beat"), [("comment", COMMENT), ("event", PING)])
@pytest.mark.parametrize("work", ["waits", "computes"])
def test_beats_come_while_the_engine_thread_is_busy(
    mode: str, beat: bytes, work: str
) -> None:
    released = threading.Event()

    def engine(loop: asyncio.AbstractEventLoop, done: asyncio.Event) -> None:
        while not released.is_set():
            if work == "waits":
                released.wait()
        loop.call_soon_threadsafe(done.set)

    async def run() -> list[bytes]:
        done = asyncio.Event()
        args = (asyncio.get_running_loop(), done)
        thread = threading.Thread(target=engine, args=args, daemon=True)
        thread.start()
        seen = []
        frames = keep_alive(
            stream(b"first", done.wait, b"last"),
            mode,  # type: ignore[arg-type]
            lambda: PING,
            interval_s=SOON_S,
        )
        async for frame in frames:
            seen.append(frame)
            if seen.count(beat) == 3:
                released.set()
        thread.join()
        return seen

    first, *beats, last = asyncio.run(run())
    assert (first, last) == (b"first", b"last")
    assert len(beats) >= 3
    assert set(beats) == {beat}


def test_nothing_comes_before_the_first_frame() -> None:
    async def ten_turns() -> None:
        for _ in range(10):
            await asyncio.sleep(SOON_S)

    frames = keep_alive(
        stream(ten_turns, b"first"), "comment", lambda: PING, interval_s=SOON_S / 10
    )
    assert asyncio.run(collect(frames)) == [b"first"]


def test_off_waits_in_silence() -> None:
    async def ten_turns() -> None:
        for _ in range(10):
            await asyncio.sleep(SOON_S)

    frames = keep_alive(
        stream(b"a", ten_turns, b"b"), "off", lambda: PING, interval_s=SOON_S / 10
    )
    assert asyncio.run(collect(frames)) == [b"a", b"b"]


def test_an_error_passes() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect(keep_alive(stream(b"a", fail), "comment", lambda: PING)))


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_leaving_early_closes_the_frames(how: str) -> None:
    closed = []

    async def frames() -> AsyncGenerator[bytes]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    async def run() -> None:
        beats = keep_alive(frames(), "comment", lambda: PING, interval_s=SOON_S)
        assert await anext(beats) == b"first"
        assert await anext(beats) == COMMENT
        if how == "closed":
            await beats.aclose()
        else:
            task = asyncio.create_task(collect(beats))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await beats.aclose()

    asyncio.run(run())
    assert closed == [True]
