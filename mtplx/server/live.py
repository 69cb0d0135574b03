"""``GET /v1/live``: what the engine does, as it does it.

One stream of server-sent events for the page and for ``mtplx top``: the iterations a few
times a second, and the state of the engine and of the SessionBank's tree once a second.
The engine records nothing while nobody watches; a client that is too slow misses
iterations, which costs nobody else anything. Requests that are over are remembered
always, the last few and as numbers.

No prompt is told. The first words of what the bank holds are, to who could have them
restored (``cache_isolation``) and only where not everybody is let in (`--no-auth`); with
one namespace for all, that is everybody with a key, or on this machine where there is
none. Runs on the event loop, but for ``_Iterations``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, Self

from fastapi import FastAPI, Request, Response

from mtplx.server.access import RequestRecord
from mtplx.server.live_shapes import LiveBank, LiveEvent, LiveOpenRequest, LiveRequest
from mtplx.server.misses import sentence
from mtplx.server.openapi import events_of, failures
from mtplx.server.service import Service
from mtplx.server.sse import EventStream, frame
from mtplx.types import BankNode, BankView, LiveIteration

TICK_S = 0.1
"""How often iterations are sent."""

STATE_S = 1.0
"""How often all else is looked at."""

MOST_ITERATIONS = 2000
MOST_REQUESTS = 50


def add_routes(app: FastAPI, service: Service, recent: RecentRequests) -> None:
    """Add the route."""

    @app.get(
        "/v1/live",
        response_class=Response,
        responses=failures((401, 403, 500, 503)) | {200: events_of(LiveEvent)},
    )
    async def live(request: Request) -> Response:
        """Tell what the engine does, until the client goes away."""
        return EventStream(LiveWatch(service, request, recent), LiveWatch.frames)


class RecentRequests:
    """The requests that ended last, in their order."""

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[LiveRequest] = deque(maxlen=MOST_REQUESTS)

    def observe(self, record: RequestRecord) -> None:
        """Remember a request that ended, if it was one to a model."""
        if record.model is None:
            return
        told: LiveRequest = {
            "id": record.request_id,
            "model": record.model,
            "end_s": time.perf_counter(),
            "outcome": record.outcome or "failed",
            "total_s": record.age_s(),
            "completion_tokens": record.completion_tokens,
        }
        if (prefill := record.metrics) is not None:
            told |= {
                "prompt_tokens": prefill.prompt_tokens,
                "cached_tokens": prefill.cached_tokens,
                "new_prefill_tokens": prefill.new_prefill_tokens,
                "prefill_tok_s": prefill.prefill_tok_s,
                "ttft_s": prefill.ttft_s,
                "why": sentence(prefill),
            }
        if (stream := record.stream) is not None:
            told |= {
                "itl_target_s": stream.itl_target_s,
                "itl_p50_s": stream.itl_p50_s,
                "itl_worst_s": stream.itl_worst_s,
                "itl_misses": stream.itl_misses,
            }
        self._last.append(told)
        self.count += 1

    def after(self, count: int) -> list[LiveRequest]:
        """Return those that ended since ``count`` of them had, as far as remembered."""
        new = self.count - count
        return [*self._last][-new:] if new else []


class _Iterations:
    """Those not sent yet. The engine's thread adds them."""

    def __init__(self) -> None:
        self._waiting: deque[LiveIteration] = deque(maxlen=MOST_ITERATIONS)
        self._told = 0
        self._taken = 0

    def __call__(self, iteration: LiveIteration) -> None:
        self._waiting.append(iteration)
        self._told += 1

    def take(self) -> tuple[list[LiveIteration], int]:
        """Return them, and how many before them are lost."""
        there = self._told
        taken = [self._waiting.popleft() for _ in range(len(self._waiting))]
        # One that was added meanwhile is counted the next time.
        missed = max(there - self._taken - len(taken), 0)
        self._taken += len(taken) + missed
        return taken, missed


class LiveWatch:
    """One client that watches; an async context manager.

    Raises:
        EngineUnavailableError: On entering, or from ``frames``.
    """

    def __init__(self, service: Service, http: Request, recent: RecentRequests) -> None:
        self._service = service
        self._recent = recent
        self._receive = http.receive
        self._iterations = _Iterations()
        self._gone = False
        settings = service.configuration.settings
        self._namespace = service.namespace(http, None) if settings.auth else None

    async def __aenter__(self) -> Self:
        self._service.engine.watch(self._iterations)
        self._listener = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.cancel()
        self._service.engine.unwatch(self._iterations)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events until the client goes away or the server stops."""
        asked: Future[BankView] = self._service.engine.view()
        bank = None
        sent = 0
        due_s = 0.0
        while not (self._gone or self._service.generations.stopping):
            if time.perf_counter() >= due_s:
                due_s = time.perf_counter() + STATE_S
                yield self._state()
                if asked.done():
                    if asked.result() != bank:
                        bank = asked.result()
                        yield _event("bank", bank=self._bank(bank))
                    asked = self._service.engine.view()
            iterations, missed = self._iterations.take()
            if iterations:
                told = [asdict(each) for each in iterations]
                yield _event("iterations", iterations=told, missed=missed)
            if requests := self._recent.after(sent):
                sent = self._recent.count
                yield _event("requests", requests=requests)
            await asyncio.sleep(TICK_S)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True

    def _state(self) -> bytes:
        requests: list[LiveOpenRequest] = [
            {
                "id": each.request_id,
                "model": each.model,
                "prompt_tokens": len(each.prompt.token_ids),
                "arrival_s": each.arrival_s,
            }
            for each in self._service.generations.requests()
        ]
        status = asdict(self._service.engine.status())
        return _event("state", engine=status, open=requests)

    def _bank(self, bank: BankView) -> LiveBank:
        loaded = self._service.engine.loaded
        names = {info.fingerprint: name for name, info in loaded.items()}
        return {
            "nodes": [
                {
                    "parent": node.parent,
                    "model": names.get(node.fingerprint),
                    "start": node.start,
                    "end": node.end,
                    "text": self._text(node),
                    "bytes": node.nbytes,
                    "snapshots": [*node.snapshots],
                    "uses": node.uses,
                    "age": node.age,
                    "pinned": node.pinned,
                    "children": node.children,
                }
                for node in bank.nodes
            ],
            "left_out": bank.left_out,
        }

    def _text(self, node: BankNode) -> str | None:
        # Only the first model's tokenizer is at hand.
        mine = node.fingerprint == self._service.info.fingerprint
        if not mine or node.namespace != self._namespace:
            return None
        return self._service.text_of(node.first_tokens)


def _event(kind: str, **more: Any) -> bytes:
    event: dict[str, Any] = {"type": kind, "now_s": time.perf_counter(), **more}
    return frame(event)
