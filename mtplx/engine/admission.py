"""The requests that have not started, and what each of them waits for.

The scheduler decides the order. Here it is known what a start needs besides a seat:
room for its state beside what runs, its state from the disk tier where that is faster
than computing it, and nobody else who is reading the same prompt right now. A retry, a
second sample of one prompt, or a second client with the same system prompt waits for
the one that reads it and restores what that one computed. Engine thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtplx.engine.disk import DiskWork
from mtplx.engine.running import EventSink
from mtplx.errors import KVBudgetError
from mtplx.generation import PromptPrefill
from mtplx.models import Model
from mtplx.scheduler.scheduler import Scheduler
from mtplx.session import Lookup, SessionBank
from mtplx.session.state import TokenRun
from mtplx.session.tree import as_run, common_length
from mtplx.types import GenerationRequest, StateKey

WORTH_WAITING_TOKENS = 64
"""A request waits for another one's prefill, or for the disk, only if that saves at
least this many tokens."""

ANSWER_TOKENS = 1024
"""Most tokens of an answer that memory is set aside for before it starts; for more it
is asked on the way."""


@dataclass
class Waiting:
    """A request in the queue.

    Attributes:
        key: What its state is filed under.
        tokens: Its prompt, ``[n]`` int32.
        lookup: What the bank has of it, in the queue and when it starts: nothing for
            whoever wants the logits of all of it. None without a bank.
        reader: The request that is reading the same prompt, and is waited for.
        needs: Tokens that ``reader`` must have computed.
    """

    request: GenerationRequest
    on_event: EventSink
    key: StateKey
    tokens: TokenRun
    lookup: Lookup | None
    reader: str | None = None
    needs: int = 0


class Admission:
    """Who may start.

    Args:
        scheduler: Knows the order.
        model, bank: The engine's; without a bank nothing is worth waiting for.
        disk: None without a disk tier.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: Model,
        bank: SessionBank | None,
        disk: DiskWork | None,
    ) -> None:
        self._scheduler = scheduler
        self._model = model
        self._bank = bank
        self._disk = disk
        self._waiting: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def attached(self) -> bool:
        """Somebody waits for another's prefill, which may be over."""
        return any(waiting.reader is not None for waiting in self._waiting.values())

    def check(self, prompt_tokens: int) -> None:
        """Refuse a prompt that could never start.

        Raises:
            KVBudgetError: Its state alone is more than the budget.
        """
        limit = None if self._bank is None else self._bank.max_bytes
        nbytes = self._model.state_size.nbytes(prompt_tokens + 1)
        if limit is not None and nbytes > limit:
            raise KVBudgetError(
                f"The KV cache of these {prompt_tokens} tokens takes {nbytes} bytes; the "
                f"budget is {limit}. Send a shorter prompt, or raise --kv-bytes."
            )

    def add(self, request: GenerationRequest, on_event: EventSink) -> None:
        """Queue a request.

        Raises:
            MtplxError: What is wrong with it; it is not queued.
        """
        self.check(len(request.prompt.token_ids))
        key = replace(self._model.state_key, namespace=request.namespace)
        tokens = as_run(request.prompt.token_ids)
        lookup = None
        if self._bank is not None:
            lookup = self._bank.look_up(key, () if request.prompt_logprobs else tokens)
        waiting = Waiting(request, on_event, key, tokens, lookup)
        restorable = _restorable(waiting)
        self._scheduler.add(
            request.request_id,
            prompt_tokens=len(waiting.tokens),
            cached_tokens=restorable,
            deadline_s=request.deadline_s,
        )
        self._waiting[request.request_id] = waiting
        if self._disk is not None and self._disk.fetch(
            request.request_id, waiting.key, waiting.tokens, restorable
        ):
            self._scheduler.hold(request.request_id)

    def remove(self, request_id: str) -> Waiting | None:
        """Forget a request that is over; None where it does not wait."""
        return self._waiting.pop(request_id, None)

    def drain(self) -> list[Waiting]:
        """Forget all requests and return them."""
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def arrived(self, request_ids: Sequence[str]) -> None:
        """Let requests go on whose state has come from the disk."""
        for request_id in request_ids:
            if waiting := self._waiting.get(request_id):
                self._scheduler.expect_cached(request_id, _restorable(waiting))

    def next(self, reading: Mapping[str, PromptPrefill]) -> Waiting | None:
        """Return the request that is to start now; it stays until ``remove``.

        Args:
            reading: The prompts that have started, by request.
        """
        self._let_go(reading)
        while (request_id := self._scheduler.next_to_start()) is not None:
            waiting = self._waiting[request_id]
            restorable = _restorable(waiting)
            if restorable != self._scheduler.expected_cached(request_id):
                # The bank has changed since the request came; that may change the order.
                self._scheduler.expect_cached(request_id, restorable)
            elif self._is_read_by_another(waiting, restorable, reading):
                self._scheduler.hold(request_id)
            else:
                return waiting
        return None

    def state_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens' memory is set aside for a request at first."""
        answer = min(request.max_new_tokens, ANSWER_TOKENS)
        return min(len(request.prompt.token_ids) + answer, self._model.context_length)

    def _let_go(self, reading: Mapping[str, PromptPrefill]) -> None:
        for request_id, waiting in self._waiting.items():
            if waiting.reader is None:
                continue
            prefill = reading.get(waiting.reader)
            if prefill is None or prefill.kept_tokens >= waiting.needs:
                waiting.reader = None
                self._scheduler.expect_cached(request_id, _restorable(waiting))

    def _is_read_by_another(
        self, waiting: Waiting, restorable: int, reading: Mapping[str, PromptPrefill]
    ) -> bool:
        """Find who computes more of this prompt than could be restored, and note it."""
        if self._bank is None or waiting.request.prompt_logprobs:
            return False
        for request_id, prefill in reading.items():
            if prefill.key != waiting.key or prefill.complete or prefill.scores:
                continue
            common = common_length(prefill.tokens, waiting.tokens)
            usable = prefill.plan.resumable(min(common, len(waiting.tokens) - 1))
            if usable - restorable >= WORTH_WAITING_TOKENS:
                waiting.reader, waiting.needs = request_id, usable
                return True
        return False


def _restorable(waiting: Waiting) -> int:
    return 0 if waiting.lookup is None else waiting.lookup.match.length
