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
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.engine.running import EventSink
from mtplx.errors import EngineUnavailableError, QueueFullError
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import (
    EngineStatus,
    Failed,
    GenerationRequest,
    ModelInfo,
    PrefillForecast,
    Prompt,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Submit:
    request: GenerationRequest
    on_event: EventSink


@dataclass(frozen=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True)
class _Ask:
    """Something to find out between two iterations."""

    question: Callable[[EngineCore], Any]
    answer: Future[Any]


@dataclass(frozen=True)
class _Wake:
    pass


@dataclass(frozen=True)
class _Stop:
    pass


_Command = _Submit | _Cancel | _Ask | _Wake | _Stop


class Engine:
    """Runs requests on a thread of its own.

    Args:
        load: Called on the engine thread; MLX ties work to the thread that made it.
        bank: Where prompt state is kept.
        settings: The effective settings.
        tier: Keeps state on disk; closed when the engine stops. None keeps none there.
    """

    def __init__(
        self,
        load: Callable[[], Model],
        bank: SessionBank,
        settings: Settings,
        tier: DiskTier | None = None,
    ) -> None:
        self._load = load
        self._bank = bank
        self._settings = settings
        self._tier = tier
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
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
            KVBudgetError: Its state alone is more than the budget.
        """
        with self._lock:
            if not self._alive:
                raise EngineUnavailableError("The engine has stopped; restart the server.")
            scheduler = self._core.scheduler
            scheduler.config.check_prompt(len(request.prompt.token_ids))
            self._core.admission.check(len(request.prompt.token_ids))
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

    def plan(self, prompt: Prompt, namespace: str = "") -> Future[PrefillForecast]:
        """Ask what reading ``prompt`` would take now; answered between two iterations.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future.
        """
        return self._ask(lambda core: core.plan(prompt, namespace))

    def pin(self, prompt: Prompt) -> int:
        """Read a prompt, never evict it, and return its tokens that are held.

        Raises:
            MtplxError: It cannot be read, or does not fit.
        """
        tokens: int = self._ask(lambda core: core.pin(prompt)).result()
        return tokens

    def _ask(self, question: Callable[[EngineCore], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if not self._alive:
                raise EngineUnavailableError("The engine has stopped; restart the server.")
            self._inbox.put(_Ask(question, answer))
        return answer

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
            bank_thinned=bank.thinned,
            bank_too_large=bank.too_large,
            cache_misses=dict(bank.misses),
            kv_limit_bytes=bank.max_bytes,
            kv_running_bytes=bank.running_nbytes,
            step_error=core.scheduler.costs.error,
            disk=core.disk_stats,
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
            self._core = EngineCore(
                model,
                self._tokenizer,
                self._bank,
                self._settings,
                tier=self._tier,
                wake=lambda: self._inbox.put(_Wake()),
            )
        except Exception as error:
            if self._tier is not None:
                self._tier.close()
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
                case _Ask(question, answer):
                    if answer.set_running_or_notify_cancel():
                        try:
                            answer.set_result(question(self._core))
                        except Exception as error:
                            answer.set_exception(error)
                    del question, answer
                case _Wake():
                    pass
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
            command = self._inbox.get()
            if isinstance(command, _Submit):
                command.on_event(Failed(gone))
            elif (
                isinstance(command, _Ask) and command.answer.set_running_or_notify_cancel()
            ):
                command.answer.set_exception(gone)
        # MLX runs this thread's work on a thread of its own, which must not outlive it:
        # it would abort the process at its exit.
        mx.clear_streams()
