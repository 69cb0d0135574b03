"""Runs what the scheduler decides, one iteration at a time.

Here scheduler, model and bank meet: start what may start (and restore its prefix), let
``stepper.py`` compute the step, report what it took. What may wait comes last in an
iteration: keeping state. Everything runs on the engine thread; ``engine.py`` is what
other threads see.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from mtplx.config import Settings
from mtplx.engine.admission import Admission, Waiting
from mtplx.engine.chunking import chunking_problem
from mtplx.engine.constraint import Grammars
from mtplx.engine.disk import DiskWork
from mtplx.engine.live import LiveRecorder
from mtplx.engine.memory import warm_up
from mtplx.engine.running import EventSink, RunningRequest
from mtplx.engine.stepper import Stepper
from mtplx.errors import (
    DeadlineExceededError,
    GenerationError,
    KVBudgetError,
    MtplxError,
)
from mtplx.generation import plan_prefill, restore_or_prefill_prompt_state
from mtplx.models import Model
from mtplx.models.batch import BatchDecoder
from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.itl import ItlRecorder
from mtplx.scheduler.scheduler import Scheduler
from mtplx.scheduler.step import Outcome
from mtplx.session import Match, SessionBank
from mtplx.session.disk import DiskTier
from mtplx.session.state import Rows
from mtplx.session.tree import as_run
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import (
    Failed,
    Finished,
    GenerationRequest,
    PrefillForecast,
    Prompt,
)

logger = logging.getLogger(__name__)

# A prefill shorter than this says nothing about the speed of the next one.
_MEASURED_TOKENS = 64


class EngineCore:
    """The requests of one model, from the queue to their end.

    Args:
        model: Loaded on this thread.
        tokenizer: The model's.
        bank: Where prompt state is kept.
        settings: The effective settings.
        tier: Keeps state on disk; None keeps none there.
        wake: Called on another thread when there is work again.
        live: Tells who watches; None where nobody can.

    Attributes:
        model: What it runs.
        work_bytes: What a span needs besides weights and state.
        scheduler: Decides; it owns the state of every request.
        decoder: Runs a decode of several streams.
        gaps: Gaps between tokens, over all streams.
        chunking_problem: Why prompts are not read in spans; None where they are.
        iterations: Iterations that computed something.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        bank: SessionBank,
        settings: Settings,
        *,
        tier: DiskTier | None = None,
        wake: Callable[[], None] = lambda: None,
        live: LiveRecorder | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._live = live or LiveRecorder()
        window = settings.prefill_window or model.prefill_window
        self.model = model
        self.work_bytes, self._token_s = warm_up(model, window)
        problem = _chunking_problem(model)
        # What must be read whole is one span, whatever its length.
        self._window = window if problem is None else model.context_length
        self._tail_grid = settings.tail_grid if problem is None else model.context_length
        # Resuming from kept state is reading in two parts.
        self._bank = bank if problem is None else None
        if problem is None and not settings.enable_chunked_prefill:
            problem = "switched off by enable_chunked_prefill"
        self.chunking_problem = problem
        self.decoder = BatchDecoder(model)
        self.scheduler = Scheduler(
            scheduler_config(
                settings,
                window,
                model.context_length,
                chunked=problem is None,
                shared=self.decoder.takes_spans,
            )
        )
        self.gaps = ItlRecorder()
        self.iterations = 0
        # Now, not under the first request: it takes a second in which nothing else runs.
        vocabulary = tokenizer.grammar_vocabulary(model.vocab_size)
        self._grammars = None if vocabulary is None else Grammars(vocabulary)
        self._disk = None
        if tier is not None and self._bank is not None:
            self._disk = DiskWork(model, bank, tier, wake, self._compute_seconds)
        self.admission = Admission(self.scheduler, model, self._bank, self._disk)
        self._running: dict[str, RunningRequest] = {}
        self._from_disk: set[str] = set()
        overlaps = settings.overlap_decode
        self._stepper = Stepper(
            self.decoder,
            self.scheduler,
            self.gaps,
            self._running,
            overlaps=model.device != "cpu" if overlaps is None else overlaps,
        )
        self.decoder.seating.holds = self._hold_free_rows
        self._free_rows = _FreeRows()

    @property
    def idle(self) -> bool:
        """There is nothing to do until a command comes, state from the disk, or the next
        deadline."""
        copying = self._disk is not None and not self._disk.idle
        late = self.scheduler.next_deadline_s <= time.perf_counter()
        waiting = self.scheduler.ready or self.admission.attached
        return not (self._running or waiting or copying or late)

    @property
    def overlapped_steps(self) -> int:
        """Decodes that began before the tokens of the last one were read."""
        return self._stepper.overlapped_steps

    @property
    def unused(self) -> bool:
        """Nobody waits for it or runs in it."""
        return not self._running and not len(self.admission) and self.idle

    def add(self, request: GenerationRequest, on_event: EventSink) -> None:
        """Queue a request; what is wrong with it becomes its only event."""
        try:
            self.admission.add(request, on_event)
        except MtplxError as error:
            on_event(Failed(error))

    def cancel(self, request_id: str) -> None:
        """End a request in whatever state it is; unknown ids are ignored."""
        ended = self.scheduler.end(request_id, Outcome.CANCELLED)
        if ended is None:
            return
        if waiting := self.admission.remove(request_id):
            waiting.on_event(Finished("cancelled", 0, None))
            return
        running = self._running.pop(request_id)
        running.cancel(ended.stall)
        self._settle(running)

    def pin(self, prompt: Prompt) -> int:
        """Read a prompt now and never evict it; return its tokens that are held.

        Raises:
            MtplxError: It cannot be read, or does not fit.
        """
        if self._bank is None:
            return 0
        restore_or_prefill_prompt_state(
            token_ids=prompt.token_ids,
            session_bank=self._bank,
            stable_prefix_len=len(prompt.token_ids),
            model=self.model,
            edges=prompt.edges,
            window=self._window,
        )
        return self._bank.pin(self.model.state_key, prompt.token_ids)

    def plan(self, prompt: Prompt, namespace: str) -> PrefillForecast:
        """Say what reading a prompt would take now. Changes nothing."""
        key = replace(self.model.state_key, namespace=namespace)
        tokens = as_run(prompt.token_ids)
        match = Match(0, 0, "disabled")
        if self._bank is not None:
            match = self._bank.match(key, tokens)
        disk_tokens, disk_s = 0, 0.0
        if self._disk is not None:
            disk_tokens, disk_s = self._disk.on_disk(key, tokens, match.length)
        restored = match.length + disk_tokens
        plan = plan_prefill(
            prompt,
            restored_tokens=restored,
            any_prefix=key.any_prefix or self._bank is None,
            window=self._window,
            tail_grid=self._tail_grid,
            parts_at=match.shared_tokens if match.divergence else None,
        )
        return PrefillForecast(
            prompt_tokens=len(tokens),
            memory_tokens=match.length,
            disk_tokens=disk_tokens,
            miss_reason=match.miss_reason,
            spans=tuple((span.start, span.end) for span in plan.spans),
            edges=plan.edges,
            snapshots=tuple(sorted(plan.snapshots)),
            kv_bytes=self.model.state_size.nbytes(len(tokens)),
            seconds=disk_s + self._compute_seconds(restored, len(tokens)),
            seconds_error=self.scheduler.costs.error,
        )

    def _compute_seconds(self, start: int, end: int) -> float:
        """Return what computing these tokens of a prompt takes, by those before."""
        return (end - start) * self._token_s

    def iterate(self) -> None:
        """Compute one step, if there is anything to compute."""
        self._expire()
        self._copy()
        self._start_requests()
        self._grow()
        begin_s = time.perf_counter()
        step = self.scheduler.schedule()
        over: list[RunningRequest] = []
        result = self._stepper.run(step, over)
        self.scheduler.apply(step, result)
        if step.is_empty:
            return
        took_s = time.perf_counter() - begin_s
        logger.debug(
            "step: %d decodes, spans %s (%s), target %s s, expected %.3f s, took %.3f s",
            len(step.decoding),
            [(span.start, span.end) for span in step.spans],
            step.why,
            step.target_s,
            step.predicted_s,
            took_s,
        )
        self.iterations += 1
        self._stepper.gap_target_s = step.target_s
        # From here on nobody waits for an event of this step.
        for running in over:
            if running.done:
                self._settle(running)
        for span in step.spans:
            if kept := self._running.get(span.request_id):
                _keep(kept.prefill.keep_progress)
        if self._live.watched:
            self._live.iterated(
                self.model.name,
                self.iterations,
                step,
                result,
                begin_s=begin_s,
                took_s=took_s,
            )

    def shut_down(self, error: MtplxError) -> None:
        """End every request with ``error``, and write what the disk is to have."""
        for waiting in self.admission.drain():
            self.scheduler.end(waiting.request.request_id, Outcome.FAILED)
            waiting.on_event(Failed(error))
        for request_id, running in self._running.items():
            self.scheduler.end(request_id, Outcome.FAILED)
            running.fail(error)
            running.prefill.release()
        self._running.clear()
        if self._disk is not None:
            self._disk.finish()

    # -- one iteration ----------------------------------------------------------

    def _expire(self) -> None:
        for ended in self.scheduler.expire(time.perf_counter()):
            error = DeadlineExceededError(
                "The request was not complete at its deadline. Allow more time, or send "
                "it again: what was read of its prompt is kept."
            )
            if waiting := self.admission.remove(ended.request_id):
                waiting.on_event(Failed(error))
            else:
                running = self._running.pop(ended.request_id)
                running.fail(error)
                self._settle(running)

    def _copy(self) -> None:
        """Move a piece of state from or to the disk."""
        if self._disk is not None:
            arrived, from_disk = self._disk.step()
            self.admission.arrived(arrived)
            self._from_disk.update(from_disk)

    def _start_requests(self) -> None:
        """Start what may start; restoring its prefix comes with it."""
        while len(self.admission):
            reading = {name: running.prefill for name, running in self._running.items()}
            waiting = self.admission.next(reading)
            if waiting is None:
                return
            request = waiting.request
            try:
                running = RunningRequest(
                    request,
                    waiting.on_event,
                    self.model,
                    self.tokenizer,
                    self._bank,
                    window=self._window,
                    tail_grid=self._tail_grid,
                    state_tokens=self.admission.state_tokens(request),
                    lookup=waiting.lookup,
                    grammars=self._grammars,
                )
            except KVBudgetError as error:
                if self.decoder.seating.free_nbytes:
                    self.decoder.seating.give_up_free_rows()
                    continue
                if self._running:
                    return  # Those that run will make room.
                self._refuse(waiting, error)
                continue
            except MtplxError as error:
                self._refuse(waiting, error)
                continue
            except Exception as error:
                logger.exception("Request %s could not start", request.request_id)
                self._refuse(waiting, GenerationError(f"The request cannot start: {error}"))
                continue
            self.admission.remove(request.request_id)
            self._running[request.request_id] = running
            prefill = running.prefill
            if request.request_id in self._from_disk:
                self._from_disk.discard(request.request_id)
                prefill.clock.source = "disk"
            self.scheduler.start(
                request.request_id,
                prefill.cache.offset,
                prefill.plan.edges,
                alone=prefill.scores,
            )
            running.tell_progress()

    def _refuse(self, waiting: Waiting, error: MtplxError) -> None:
        request_id = waiting.request.request_id
        self.admission.remove(request_id)
        self.scheduler.end(request_id, Outcome.FAILED)
        waiting.on_event(Failed(error))

    def _hold_free_rows(self, nbytes: int) -> bool:
        """Count what lies free among the streams; False where there is no room for it."""
        if self._bank is None or nbytes == self._free_rows.reserved:
            return True
        if not self._bank.reserve(self._free_rows, nbytes):
            return False
        self._free_rows.reserved = nbytes
        return True

    def _grow(self) -> None:
        """Make sure that every stream has memory for one more token, or end it."""
        for request_id, running in [*self._running.items()]:
            if self._has_memory(running):
                continue
            # Its last token may be drawn already, and be its end.
            self._read_ahead()
            if request_id not in self._running or self._has_memory(running):
                continue
            prefill = running.prefill
            logger.warning(
                "Request %s ends at %d tokens: the KV budget of %s bytes is used up by "
                "requests that run. Allow fewer at once, or raise --kv-bytes.",
                request_id,
                prefill.cache.offset,
                None if self._bank is None else self._bank.max_bytes,
            )
            running.end_early()
            running.finish(self.scheduler.stall(request_id))
            self.scheduler.end(request_id, Outcome.FINISHED)
            self._settle(self._running.pop(request_id))

    def _has_memory(self, running: RunningRequest) -> bool:
        prefill = running.prefill
        tokens = prefill.cache.offset + self._stepper.tokens_ahead + 1
        return not prefill.complete or prefill.reserve(tokens)

    def _read_ahead(self) -> None:
        over: list[RunningRequest] = []
        self._stepper.read_ahead(over)
        for running in over:
            self._settle(running)

    def _settle(self, running: RunningRequest) -> None:
        """Keep what a request computed, and let go of what it borrowed."""
        self._stepper.forget(running)
        prefill = running.prefill
        _keep(running.keep)
        if prefill.kept_tokens and self._disk is not None:
            self._disk.keep(prefill.key, running.token_ids[: prefill.kept_tokens])
        prefill.release()
        self._hold_free_rows(self.decoder.seating.free_nbytes)
        computed = sum(prefill.clock.span_tokens)
        if computed >= _MEASURED_TOKENS:
            self._token_s = prefill.clock.compute_s / computed


class _FreeRows:
    """Memory between the streams of a group, as the bank weighs it: reserved."""

    nbytes = 0
    reserved = 0

    def copy(self, start: int, end: int) -> Rows:
        raise AssertionError("nothing is kept there")


def _keep(store: Callable[[], None]) -> None:
    """Give the bank something; if that fails, the state is lost and nothing else."""
    try:
        store()
    except Exception:
        logger.exception("State could not be kept")


def scheduler_config(
    settings: Settings, window: int, context_length: int, *, chunked: bool, shared: bool
) -> SchedulerConfig:
    """Return the scheduler's settings.

    Args:
        settings: What the user wants.
        window: Longest span in tokens.
        context_length: Of the model, in tokens.
        chunked: Prompts can be, and are to be, read in spans.
        shared: A span can share the forward of a decode.

    Raises:
        ConfigError: The settings contradict each other.
    """
    target_ms = settings.target_itl_ms
    if chunked:
        budget = max(window, settings.max_num_seqs + SchedulerConfig.min_prefill_tokens)
    else:
        budget = context_length + settings.max_num_seqs
    return SchedulerConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens or budget,
        max_num_seqs=settings.max_num_seqs,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_chunked_prefill=chunked,
        spans_share_decodes=shared and chunked,
        prefill_window=window,
        target_itl_s=None if target_ms is None else target_ms / 1000,
        max_queue=settings.max_queue,
    )


def _chunking_problem(model: Model) -> str | None:
    problem = chunking_problem(model)
    if problem is not None:
        logger.warning(
            "%s cannot be read in spans (%s). Every prompt is read whole, streams wait "
            "for it, no state is reused, and prompts above max_num_batched_tokens are "
            "refused.",
            model.name,
            problem,
        )
    return problem
