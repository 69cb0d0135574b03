"""The one thread that owns MLX, as other threads see it.

It loads the model, takes commands from any thread through its inbox, and runs
``core.py`` iteration by iteration; a command waits for one iteration at most. Other
threads only put commands in and read counters.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

import mlx.core as mx

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.engine.running import EventSink
from mtplx.errors import EngineUnavailableError, QueueFullError
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import EngineStatus, Failed, GenerationRequest, ModelInfo

logger = logging.getLogger(__name__)


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
        settings: The effective settings.
    """

    def __init__(
        self, load: Callable[[], Model], bank: SessionBank, settings: Settings
    ) -> None:
        self._load = load
        self._bank = bank
        self._settings = settings
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unseen = 0
        self._alive = False
        self._ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="mtplx-engine", daemon=True)

    # -- any thread -------------------------------------------------------------

    def start(self) -> None:
        """Load the model and begin to serve.

        Raises:
            ModelLoadError: The model cannot be had.
            ConfigError: The device, the dtype or a combination of settings cannot be
                used.
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
            QueueFullError: Too many requests wait already.
            EngineUnavailableError: The engine does not run.
            InvalidRequestError: The prompt must be read whole and is too long for that.
        """
        with self._lock:
            if not self._alive:
                raise EngineUnavailableError("The engine has stopped; restart the server.")
            scheduler = self._core.scheduler
            scheduler.config.check_prompt(len(request.prompt.token_ids))
            waiting = scheduler.waiting + self._unseen
            if waiting >= scheduler.config.max_waiting(scheduler.running):
                raise QueueFullError(
                    f"{waiting} requests wait already; try again later.",
                    retry_after_s=scheduler.retry_after_s(),
                )
            self._unseen += 1
            self._inbox.put(_Submit(request, on_event))

    def cancel(self, request_id: str) -> None:
        """End a request after the current iteration. Unknown ids are ignored."""
        self._inbox.put(_Cancel(request_id))

    def status(self) -> EngineStatus:
        """Return the counters of this moment."""
        if not self._alive:
            return EngineStatus(alive=False)
        core, bank = self._core, self._bank
        return EngineStatus(
            alive=True,
            waiting=core.scheduler.waiting + self._unseen,
            running=core.scheduler.running,
            iterations=core.iterations,
            batch_mode=core.decoder.mode,
            batch_fallback_reason=core.decoder.fallback_reason,
            chunked_prefill=core.chunking_problem is None,
            chunked_prefill_reason=core.chunking_problem,
            itl=core.gaps.summary(),
            step_cost=asdict(core.scheduler.costs.cost),
            bank_tokens=bank.tokens,
            bank_bytes=bank.nbytes,
            bank_entries=bank.entries,
            bank_evictions=bank.evictions,
            pinned=bank.pinned,
        )

    def stop(self) -> None:
        """End every request and the thread; returns when both are over."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    # -- engine thread ----------------------------------------------------------

    def _main(self) -> None:
        try:
            model = self._load()
            self._info = model.info
            self._tokenizer = Tokenizer(model.tokenizer)
            self._core = EngineCore(model, self._tokenizer, self._bank, self._settings)
        except Exception as error:
            mx.clear_streams()
            self._ready.put(error)
            return
        self._alive = True
        self._ready.put(None)
        try:
            while self._obey():
                self._core.iterate()
        except Exception:
            logger.exception("The engine stopped on an error of its own")
        finally:
            self._shut_down()

    def _obey(self) -> bool:
        """Carry out the commands in the inbox; wait for one when there is no work."""
        while True:
            try:
                command = self._inbox.get(block=self._core.idle)
            except queue.Empty:
                return True
            match command:
                case _Submit(request, on_event):
                    self._core.add(request, on_event)
                    with self._lock:
                        self._unseen -= 1
                    del request, on_event
                case _Cancel(request_id):
                    self._core.cancel(request_id)
                case _Stop():
                    return False
            # An idle engine holds on to no request that is over.
            del command

    def _shut_down(self) -> None:
        with self._lock:
            self._alive = False
        gone = EngineUnavailableError("The engine has stopped; restart the server.")
        self._core.shut_down(gone)
        while not self._inbox.empty():
            if isinstance(command := self._inbox.get(), _Submit):
                command.on_event(Failed(gone))
        # MLX runs this thread's work on a thread of its own, which must not outlive it:
        # it would abort the process at its exit.
        mx.clear_streams()
