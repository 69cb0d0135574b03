"""The one thread that owns MLX, as other threads see it.

It takes commands from any thread through its inbox and runs the loaded models, iteration
by iteration in turns; a command waits for one round at most. Which models are loaded is
decided in ``models.py``. Other threads only put commands in and read counters.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.engine.live import LiveRecorder
from mtplx.engine.memory import MemoryShares, memory_shares
from mtplx.engine.models import EngineModels, Load, LoadedModel
from mtplx.engine.running import EventSink
from mtplx.errors import EngineUnavailableError, MtplxError, QueueFullError
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import (
    BankView,
    EngineStatus,
    Failed,
    GenerationRequest,
    LiveSink,
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

    question: Callable[[], Any]
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
        load: Loads the first model, on the engine thread: MLX ties work to the thread
            that made it.
        bank: Where prompt state is kept.
        settings: The effective settings.
        tier: Keeps state on disk; closed when the engine stops. None keeps none there.
        others: Further models by name, loaded when they are first asked for.
    """

    def __init__(
        self,
        load: Load,
        bank: SessionBank,
        settings: Settings,
        tier: DiskTier | None = None,
        others: Mapping[str, Load] | None = None,
    ) -> None:
        self._bank = bank
        self._tier = tier
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unseen = 0
        self._alive = False
        self._live = LiveRecorder()
        self._models = EngineModels(
            load,
            others or {},
            bank,
            settings,
            tier=tier,
            wake=lambda: self._inbox.put(_Wake()),
            live=self._live,
        )
        self._ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="mtplx-engine", daemon=True)

    # -- any thread -------------------------------------------------------------

    def start(self) -> None:
        """Load the first model and begin to serve.

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
        """Facts about the first model, once started."""
        return self._models.first.model.info

    @property
    def memory(self) -> MemoryShares:
        """Who has which part of the memory, once started."""
        status = self.status()
        model = self._models.first.model
        return memory_shares(model, status.bank_bytes, status.kv_limit_bytes or 0)

    @property
    def tokenizer(self) -> Tokenizer:
        """The first model's tokenizer, once started."""
        return self._models.first.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """The models that may be asked for, the first one first."""
        return self._models.names

    @property
    def loaded(self) -> dict[str, ModelInfo]:
        """The models that are in memory, by name, the first one first."""
        return {name: core.model.info for name, core in self._models.loaded.items()}

    def model(self, name: str) -> Future[LoadedModel]:
        """Ask for a model by name; it is loaded if need be, which holds up all others.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future, as is
                all that ``EngineModels.core`` raises.
        """
        core = self._models.get(name)
        if core is None:
            return self._ask(lambda: _loaded(self._models.core(name)))
        there: Future[LoadedModel] = Future()
        there.set_result(_loaded(core))
        return there

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
            core = self._models.get(request.model)
            if core is not None:
                scheduler = core.scheduler
                scheduler.config.check_prompt(len(request.prompt.token_ids))
                core.admission.check(len(request.prompt.token_ids))
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

    def plan(
        self, prompt: Prompt, namespace: str = "", model: str = ""
    ) -> Future[PrefillForecast]:
        """Ask what reading ``prompt`` would take now; answered between two iterations.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future.
        """
        return self._ask(lambda: self._models.core(model).plan(prompt, namespace))

    def pin(self, prompt: Prompt) -> int:
        """Read a prompt, never evict it, and return its tokens that are held.

        Raises:
            MtplxError: It cannot be read, or does not fit.
        """
        tokens: int = self._ask(lambda: self._models.first.pin(prompt)).result()
        return tokens

    def watch(self, sink: LiveSink) -> None:
        """Tell ``sink`` of each iteration from now on, until ``unwatch``.

        Raises:
            EngineUnavailableError: The engine has stopped.
        """
        self._ask(lambda: self._live.attach(sink))

    def unwatch(self, sink: LiveSink) -> None:
        """Tell it no more. Does nothing when the engine has stopped."""
        with contextlib.suppress(EngineUnavailableError):
            self._ask(lambda: self._live.detach(sink))

    def view(self) -> Future[BankView]:
        """Ask what the SessionBank holds; answered between two iterations.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future.
        """
        return self._ask(self._bank.view)

    def status(self) -> EngineStatus:
        """Return the counters of this moment. What differs between models (how they
        batch and are read, what a step costs) is the first one's."""
        if not self._alive:
            return EngineStatus(alive=False)
        first, bank = self._models.first, self._bank
        cores = [*self._models.loaded.values()]
        return EngineStatus(
            alive=True,
            waiting=sum(core.scheduler.waiting for core in cores) + self._unseen,
            running=sum(core.scheduler.running for core in cores),
            iterations=self._models.iterations,
            batch_mode=first.decoder.mode,
            batch_fallback_reason=first.decoder.fallback_reason,
            overlapped_steps=sum(core.overlapped_steps for core in cores),
            chunked_prefill=first.chunking_problem is None,
            chunked_prefill_reason=first.chunking_problem,
            itl=first.gaps.summary(),
            step_cost=asdict(first.scheduler.costs.cost),
            step_error=first.scheduler.costs.error,
            bank_tokens=bank.tokens,
            bank_bytes=bank.nbytes,
            bank_entries=bank.entries,
            bank_evictions=bank.evictions,
            bank_thinned=bank.thinned,
            bank_too_large=bank.too_large,
            cache_misses=dict(bank.misses),
            kv_limit_bytes=bank.max_bytes,
            kv_running_bytes=bank.running_nbytes,
            disk=None if self._tier is None else self._tier.stats(),
            pinned=bank.pinned,
        )

    def stop(self) -> None:
        """End every request and the thread; returns when both are over."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def _ask(self, question: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if not self._alive:
                raise EngineUnavailableError("The engine has stopped; restart the server.")
            self._inbox.put(_Ask(question, answer))
        return answer

    # -- engine thread ----------------------------------------------------------

    def _main(self) -> None:
        try:
            self._models.load_first()
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
                self._models.iterate()
        except Exception:
            logger.exception("The engine stopped on an error of its own")
        finally:
            self._shut_down()

    def _obey(self) -> bool:
        """Carry out the commands in the inbox; wait for one when there is no work."""
        models = self._models
        while True:
            try:
                command = self._inbox.get(models.idle, models.rest_s())
            except queue.Empty:
                return True
            match command:
                case _Submit(request, on_event):
                    try:
                        # Loaded once more, if it went since it was asked for.
                        models.core(request.model).add(request, on_event)
                    except MtplxError as error:
                        on_event(Failed(error))
                    with self._lock:
                        self._unseen -= 1
                    del request, on_event
                case _Cancel(request_id):
                    for core in models.loaded.values():
                        core.cancel(request_id)
                case _Ask(question, answer):
                    _answer(question, answer)
                    del question, answer
                case _Wake():
                    return True
                case _Stop():
                    return False
            # An idle engine holds on to no request that is over.
            del command

    def _shut_down(self) -> None:
        with self._lock:
            self._alive = False
        gone = EngineUnavailableError("The engine has stopped; restart the server.")
        for core in self._models.loaded.values():
            core.shut_down(gone)
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, _Submit):
                command.on_event(Failed(gone))
            elif (
                isinstance(command, _Ask) and command.answer.set_running_or_notify_cancel()
            ):
                command.answer.set_exception(gone)
        if self._tier is not None:
            self._tier.close()
        gc.unfreeze()
        # MLX runs this thread's work on a thread of its own, which must not outlive it:
        # it would abort the process at its exit.
        mx.clear_streams()


def _loaded(core: EngineCore) -> LoadedModel:
    return LoadedModel(core.model.info, core.tokenizer)


def _answer(question: Callable[[], Any], answer: Future[Any]) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(question())
    except Exception as error:
        answer.set_exception(error)
