"""The one thread that owns MLX.

It loads the model, takes requests from any thread, runs them and sends their events
out. Other threads only put commands into its inbox and read counters. Requests run one
after another here; each iteration gives the running one a single step, a span or a
token, so that a command waits for one step at most.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mtplx.engine.running import EventSink, RunningRequest
from mtplx.errors import EngineUnavailableError, GenerationError, QueueFullError
from mtplx.generation.spans import DEFAULT_TAIL_GRID
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import EngineStatus, Failed, Finished, GenerationRequest, ModelInfo

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 2.0
"""What a client is told when the queue is full: about one short answer."""


@dataclass(frozen=True)
class _Submit:
    request: GenerationRequest
    on_event: EventSink


@dataclass(frozen=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True)
class _Stop:
    pass


class Engine:
    """Runs requests on a thread of its own.

    Args:
        load: Called on the engine thread; MLX ties work to the thread that made it.
        bank: Where prompt state is kept.
        window: Longest prefill span in tokens; None lets the device decide.
        tail_grid: Grid on which a prompt's tail is cut.
        max_queue: Requests that may wait.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        bank: SessionBank,
        *,
        window: int | None = None,
        tail_grid: int = DEFAULT_TAIL_GRID,
        max_queue: int = 64,
    ) -> None:
        self._load = load
        self._bank = bank
        self._window = window
        self._tail_grid = tail_grid
        self._max_queue = max_queue
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unstarted = 0
        self._iterations = 0
        self._alive = False
        self._waiting: OrderedDict[str, _Submit] = OrderedDict()
        self._running: RunningRequest | None = None
        self._ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="mtplx-engine", daemon=True)

    # -- any thread -------------------------------------------------------------

    def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            ModelLoadError: The model cannot be had.
            ConfigError: The device or dtype cannot be used.
        """
        self._thread.start()
        error = self._ready.get()
        if error is not None:
            raise error

    @property
    def info(self) -> ModelInfo:
        """Facts about the model, once started."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, once started."""
        return self._tokenizer

    def submit(self, request: GenerationRequest, on_event: EventSink) -> None:
        """Queue a request.

        Args:
            request: Its prompt must leave room for at least one token.
            on_event: Called on the engine thread for each event; must not block.

        Raises:
            QueueFullError: ``max_queue`` requests wait already.
            EngineUnavailableError: The engine does not run.
        """
        with self._lock:
            if not self._alive:
                raise EngineUnavailableError("The engine has stopped; restart the server.")
            if self._unstarted >= self._max_queue:
                raise QueueFullError(
                    f"{self._max_queue} requests are waiting already; try again later.",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._unstarted += 1
            self._inbox.put(_Submit(request, on_event))

    def cancel(self, request_id: str) -> None:
        """End a request at its next step. Unknown ids are ignored."""
        self._inbox.put(_Cancel(request_id))

    def status(self) -> EngineStatus:
        """Return the counters of this moment."""
        return EngineStatus(
            alive=self._alive,
            waiting=self._unstarted,
            running=int(self._running is not None),
            iterations=self._iterations,
            bank_tokens=self._bank.tokens,
            bank_bytes=self._bank.nbytes,
            bank_entries=self._bank.entries,
            bank_evictions=self._bank.evictions,
            pinned=self._bank.pinned,
        )

    def stop(self) -> None:
        """Cancel everything and end the thread; returns when it has ended."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    # -- engine thread ----------------------------------------------------------

    def _main(self) -> None:
        try:
            self._model = self._load()
            self._info = self._model.info
            self._tokenizer = Tokenizer(self._model.tokenizer)
        except Exception as error:
            mx.clear_streams()
            self._ready.put(error)
            return
        self._alive = True
        self._ready.put(None)
        try:
            while self._obey():
                self._iterate()
        except Exception:
            logger.exception("The engine stopped on an error of its own")
        finally:
            self._shut_down()

    def _obey(self) -> bool:
        """Carry out the commands in the inbox; wait for one when there is no work."""
        while True:
            idle = self._running is None and not self._waiting
            try:
                command = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            match command:
                case _Submit(request, _):
                    self._waiting[request.request_id] = command
                case _Cancel(request_id):
                    self._cancel(request_id)
                case _Stop():
                    return False
            # An idle engine holds on to no request that is over.
            del command

    def _cancel(self, request_id: str) -> None:
        if waiting := self._waiting.pop(request_id, None):
            self._left_queue()
            waiting.on_event(Finished("cancelled", 0, None))
        elif self._running and self._running.request.request_id == request_id:
            self._guard(self._running, self._running.cancel)

    def _iterate(self) -> None:
        """Give the running request one step; start the next one when there is none."""
        if self._running is None:
            if not self._waiting:
                return
            _, waiting = self._waiting.popitem(last=False)
            self._left_queue()
            self._running = self._begin(waiting)
        if self._running is not None:
            self._iterations += 1
            self._guard(self._running, self._running.step)

    def _begin(self, waiting: _Submit) -> RunningRequest | None:
        try:
            return RunningRequest(
                waiting.request,
                waiting.on_event,
                self._model,
                self._tokenizer,
                self._bank,
                window=self._window or self._model.prefill_window,
                tail_grid=self._tail_grid,
            )
        except Exception as error:
            logger.exception("Request %s could not start", waiting.request.request_id)
            waiting.on_event(Failed(GenerationError(f"The request cannot start: {error}")))
            return None

    def _guard(self, running: RunningRequest, act: Callable[[], None]) -> None:
        """Let ``running`` act; its error ends it and nobody else."""
        try:
            act()
        except Exception as error:
            running.fail(error)
        if running.ended:
            self._running = None

    def _left_queue(self) -> None:
        with self._lock:
            self._unstarted -= 1

    def _shut_down(self) -> None:
        with self._lock:
            self._alive = False
        gone = EngineUnavailableError("The engine has stopped; restart the server.")
        if self._running is not None:
            self._running.fail(gone)
            self._running = None
        while not self._inbox.empty():
            if isinstance(command := self._inbox.get(), _Submit):
                self._waiting[command.request.request_id] = command
        while self._waiting:
            _, waiting = self._waiting.popitem(last=False)
            self._left_queue()
            waiting.on_event(Failed(gone))
        # MLX runs this thread's work on a thread of its own, which must not outlive it:
        # it would abort the process at its exit.
        mx.clear_streams()
