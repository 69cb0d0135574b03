"""The bridge from the engine's thread to the event loop.

``Generation`` is the engine's work for one HTTP request, one or several answers, as an
async iterator of their events. Entering it submits, leaving it cancels what has not
ended, and while it is open a watcher waits for the client to go away, whether the
answer is streamed or not. ``Generations`` knows the open ones, so that a server that
stops can end them.

Invariants: an open generation is in the registry; a submitted request is cancelled or
has ended when its generation closes. Everything runs on the event loop except
``_from_engine``, which the engine calls on its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import Self

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from mtplx.errors import EngineUnavailableError, MtplxError
from mtplx.server.access import RequestRecord
from mtplx.server.errors import STOPPING
from mtplx.server.interfaces import EngineClient
from mtplx.types import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptLogprobs,
    TextDelta,
)

logger = logging.getLogger("mtplx.server")

GenerationEvent = PrefillProgress | PromptLogprobs | TextDelta | Finished


class Generations:
    """The generations that are open in this server.

    Attributes:
        stopping: The server stops.
    """

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self._open: set[Generation] = set()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._open)

    def requests(self) -> list[GenerationRequest]:
        """Return the requests that the engine has not ended, the oldest first."""
        running = [each for generation in self._open for each in generation.requests()]
        return sorted(running, key=lambda each: each.arrival_s)

    def add(self, generation: Generation) -> None:
        """Register an open generation.

        Raises:
            EngineUnavailableError: The server is stopping.
        """
        if self.stopping:
            raise _stopping()
        self._open.add(generation)

    def discard(self, generation: Generation) -> None:
        """Forget a closed generation."""
        self._open.discard(generation)

    def stop(self) -> None:
        """End every open generation and refuse new ones."""
        self.stopping = True
        for generation in self._open:
            generation.abandon()


class Generation:
    """The requests to the engine that answer one HTTP request.

    An async context manager and the async iterator of ``(index, event)``, where
    ``index`` counts ``requests``. Each request ends with one ``Finished`` whose reason is
    ``stop`` or ``length``; the iterator ends when all have.

    Raises:
        QueueFullError, EngineUnavailableError: On entering; nothing is left submitted.
        MtplxError: On iterating, when a request failed.
        ClientDisconnect: On iterating, when the client went away.
    """

    def __init__(
        self,
        registry: Generations,
        requests: Sequence[GenerationRequest],
        receive: Receive,
        record: RequestRecord,
    ) -> None:
        self._registry = registry
        self._engine = registry.engine
        self._requests = requests
        self._receive = receive
        self._record = record
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._running: set[int] = set()
        self._client_gone = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._registry.add(self)
        try:
            for index, request in enumerate(self._requests):
                self._engine.submit(request, partial(self._from_engine, index))
                self._running.add(index)
        except BaseException:
            self._registry.discard(self)
            self.cancel()
            raise
        self._watcher = asyncio.create_task(self._cancel_when_client_gone())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watcher.cancel()
        self._registry.discard(self)
        if self._running:
            if self._record.outcome != "failed":
                self._record.outcome = "cancelled"
            self.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, GenerationEvent]:
        if not self._running:
            raise StopAsyncIteration
        index, event = await self._events.get()
        if isinstance(event, Failed):
            self._running.discard(index)
            self._record.outcome = "failed"
            self._log(event.error)
            raise event.error
        if isinstance(event, Finished):
            self._running.discard(index)
            self._record.outcome = event.reason
            self._record.metrics = event.metrics
            self._record.stream = event.stream
            self._record.completion_tokens += event.completion_tokens
            if event.reason == "cancelled":
                raise ClientDisconnect if self._client_gone else _stopping()
        return index, event

    def requests(self) -> list[GenerationRequest]:
        """Return those that have not ended."""
        return [self._requests[index] for index in sorted(self._running)]

    def cancel(self) -> None:
        """Ask the engine to end what runs; the last events still arrive."""
        for index in self._running:
            self._engine.cancel(self._requests[index].request_id)

    def abandon(self) -> None:
        """End with an error now. The engine may be in a long span; nobody waits for it."""
        self.cancel()
        self._events.put_nowait((0, Failed(_stopping())))

    def _log(self, error: MtplxError) -> None:
        # An engine that stops is told once, by itself, not once for each request.
        if not isinstance(error, EngineUnavailableError):
            name = self._record.request_id
            logger.warning("%s failed: %s", name, error, exc_info=error.__cause__)

    def _from_engine(self, index: int, event: Event) -> None:
        # The loop is closed when the server is gone; nobody waits for the event then.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def _cancel_when_client_gone(self) -> None:
        # The body has been read, so the next message can only be the end.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_gone = True
        self.cancel()


def _stopping() -> EngineUnavailableError:
    # Each time anew: an error that was raised holds on to what was on the stack then.
    return EngineUnavailableError(str(STOPPING))
