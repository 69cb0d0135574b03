"""An engine and a tokenizer that behave like the real ones, without a model.

The tokenizer's tokens are bytes. The engine answers ``w0 w1 w2 ...``, one word a
token, on a thread of its own; it keeps the requests it was given, counts the prefix
that two prompts in a row share as cached, and waits at ``gate`` before each token so
that a test decides when time passes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from mtplx.errors import EngineUnavailableError, InvalidRequestError, QueueFullError
from mtplx.metrics import PrefillClock, PrefillMetrics
from mtplx.types import (
    EngineStatus,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Prompt,
    TextDelta,
)

ANSWER_TOKENS = 5


class FakeTokenizer:
    """Bytes are tokens; the text ``forbidden`` is refused."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.template_kwargs: dict[str, Any] = {}

    def render_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> Prompt:
        self.messages, self.template_kwargs = messages, template_kwargs
        history = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        prompt = self.render_text(history + "<assistant>")
        return Prompt(prompt.token_ids, (len(history),), len(history))

    def render_text(self, text: str) -> Prompt:
        if "forbidden" in text:
            raise InvalidRequestError("This text is forbidden.", param="messages")
        return Prompt(tuple(text.encode()))


class FakeEngine:
    """Runs requests one after another until ``close``.

    Attributes:
        gate: Closed (cleared), it holds the engine before its next token; a
            cancellation passes.
        failure: When set, the event that replaces the second token of every answer.
        refusal: When set, what ``submit`` raises.
        alive: What ``status`` says.
        requests: What was submitted.
        ended: Request id -> its last event.
    """

    def __init__(self) -> None:
        self._inbox: queue.Queue[tuple[GenerationRequest, Callable[[Event], None]] | None]
        self._inbox = queue.Queue()
        self._cancelled: set[str] = set()
        self._changed = threading.Condition()
        self._previous: tuple[int, ...] = ()
        self.reset()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Failed | None = None
        self.refusal: Exception | None = None
        self.alive = True
        self.requests: list[GenerationRequest] = []
        self.ended: dict[str, Event] = {}

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        self._inbox.put((request, on_event))

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def status(self) -> EngineStatus:
        return EngineStatus(alive=self.alive, running=len(self.requests) - len(self.ended))

    def close(self) -> None:
        self.gate.set()
        self._inbox.put(None)
        self._thread.join()

    def open_gate(self) -> None:
        with self._changed:
            self.gate.set()
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; fail after ten seconds."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10)

    def wait_submitted(self, count: int = 1) -> None:
        self.wait(lambda: len(self.requests) >= count)

    def wait_idle(self) -> None:
        self.wait(lambda: len(self.ended) == len(self.requests))

    def _run(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        # A frame of its own: an idle engine holds on to no request.
        item = self._inbox.get()
        if item is None:
            return False
        request, on_event = item
        last = self._answer(request, on_event)
        on_event(last)
        with self._changed:
            self.ended[request.request_id] = last
            self._changed.notify_all()
        return True

    def _answer(
        self, request: GenerationRequest, on_event: Callable[[Event], None]
    ) -> Event:
        metrics = self._prefill(request)
        tokens = min(request.max_new_tokens, ANSWER_TOKENS)
        on_event(TextDelta("", ()))
        for n in range(tokens):
            if not self._may_go_on(request.request_id):
                return Finished("cancelled", n, metrics if n else None)
            if n == 1 and self.failure is not None:
                return self.failure
            on_event(TextDelta(f"w{n} ", (n,)))
        whole = tokens == ANSWER_TOKENS
        return Finished("stop" if whole else "length", tokens, metrics)

    def _may_go_on(self, request_id: str) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self.gate.is_set() or request_id in self._cancelled
            )
            return request_id not in self._cancelled

    def _prefill(self, request: GenerationRequest) -> PrefillMetrics:
        token_ids = request.prompt.token_ids
        cached = 0
        for mine, before in zip(token_ids[:-1], self._previous, strict=False):
            if mine != before:
                break
            cached += 1
        self._previous = token_ids
        clock = PrefillClock(len(token_ids), request.arrival_s, start_s=time.perf_counter())
        clock.restored(cached, 0.0, "empty")
        clock.computed(len(token_ids) - cached, 0.001)
        clock.end_s = clock.first_token_s = time.perf_counter()
        return clock.metrics()


def queue_full() -> QueueFullError:
    return QueueFullError("64 requests wait already. Try again later.", retry_after_s=1.2)


def engine_stopped() -> EngineUnavailableError:
    return EngineUnavailableError("The engine has stopped. Restart the server.")
