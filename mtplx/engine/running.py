"""One request on the engine thread: its prefill, its tokens, its text, its end.

It knows what to tell its client and what to keep of its work; when it may compute is
the scheduler's business, and ``core.py`` does the computing. Its last event is
``Finished`` or ``Failed``, sent exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import mlx.core as mx

from mtplx.engine.sampling import NOT_A_NUMBER, Sampler
from mtplx.errors import GenerationError, MtplxError
from mtplx.generation import PromptPrefill
from mtplx.metrics import StreamMetrics
from mtplx.models import Model
from mtplx.scheduler.itl import ItlRecorder
from mtplx.scheduler.step import Stall
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Event, Failed, Finished, FinishReason, GenerationRequest, TextDelta

logger = logging.getLogger(__name__)

EventSink = Callable[[Event], None]


class RunningRequest:
    """A request that has started; restoring its prefix is the first thing it does.

    Args:
        request: What to do.
        on_event: Called on the engine thread; must not block.
        model, tokenizer: The engine's.
        bank: The engine's; None keeps nothing.
        window: Longest prefill span in tokens.
        tail_grid: Grid on which the tail is cut.

    Attributes:
        prefill: The prompt on its way, then the cache that decodes.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: EventSink,
        model: Model,
        tokenizer: Tokenizer,
        bank: SessionBank | None,
        *,
        window: int,
        tail_grid: int,
    ) -> None:
        self.request = request
        self._on_event = on_event
        prompt = request.prompt
        self._end_tokens = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        room = model.context_length - len(prompt.token_ids)
        self._most_tokens = min(request.max_new_tokens, room)
        self._sampler = Sampler(request.sampling, prompt.token_ids)
        self._text = tokenizer.text_stream(prompt.token_ids, request.stop)
        self._generated: list[int] = []
        self._gaps = ItlRecorder(recent=256)
        self._last_token_s: float | None = None
        self._reason: FinishReason | None = None
        self.prefill = PromptPrefill(
            model,
            prompt,
            bank,
            arrival_s=request.arrival_s,
            window=window,
            tail_grid=tail_grid,
        )

    @property
    def last_token(self) -> int:
        """The token that the next decode reads."""
        return self._generated[-1]

    @property
    def done(self) -> bool:
        """True once its last token is known."""
        return self._reason is not None

    def draw(self) -> mx.array:
        """Return the next token, not evaluated yet."""
        logits = self.prefill.cache.logits
        assert logits is not None
        return self._sampler.draw(logits, self._generated)

    def accept(self, token: int, target_s: float | None) -> float | None:
        """Take a drawn token and tell the client.

        Args:
            token: As ``draw`` gave it.
            target_s: Longest gap between tokens that was aimed at.

        Returns:
            Seconds since the token before; None for the first one.

        Raises:
            GenerationError: The model gave logits that are not numbers.
        """
        if token == NOT_A_NUMBER:
            raise GenerationError(
                "The model produced logits that are not numbers. "
                "Try another dtype, float32 say, or another copy of the model."
            )
        now_s = time.perf_counter()
        gap_s = None if self._last_token_s is None else now_s - self._last_token_s
        if gap_s is None:
            self.prefill.clock.first_token_s = now_s
        else:
            self._gaps.record(gap_s, target_s)
        self._last_token_s = now_s
        self._generated.append(token)
        is_end = token in self._end_tokens
        text = "" if is_end else self._text.push(token)
        full = len(self._generated) >= self._most_tokens
        if is_end or full or self._text.stopped:
            # A stop string may show only now, if it waited for a longer one.
            text += self._text.finish()
            self._reason = "stop" if is_end or self._text.stopped else "length"
        self._on_event(TextDelta(text, (token,)))
        return gap_s

    def finish(self, stall: Stall) -> None:
        """Tell the client that its answer is complete."""
        assert self._reason is not None
        self._send_end(self._reason, stall)

    def cancel(self, stall: Stall) -> None:
        """Tell the client, if it is still there, that its request was given up."""
        self._send_end("cancelled", stall)

    def fail(self, error: Exception) -> None:
        """Tell the client what went wrong."""
        if not isinstance(error, MtplxError):
            logger.error("Request %s failed", self.request.request_id, exc_info=error)
            error = GenerationError(f"The model failed on this request: {error}")
        self._on_event(Failed(error))

    def keep(self) -> None:
        """Give the bank all of it: prompt and answer, as far as they were read."""
        self.prefill.store((*self.request.prompt.token_ids, *self._generated))

    def _send_end(self, reason: FinishReason, stall: Stall) -> None:
        metrics = self.prefill.metrics()
        stream = None if metrics is None else self._stream_metrics(stall)
        self._on_event(Finished(reason, len(self._generated), metrics, stream))

    def _stream_metrics(self, stall: Stall) -> StreamMetrics:
        gaps = self._gaps.summary()
        return StreamMetrics(
            itl_target_s=gaps.target_s,
            itl_p50_s=gaps.p50_s,
            itl_p99_s=gaps.p99_s,
            itl_worst_s=gaps.worst_s,
            itl_misses=gaps.misses,
            stall_suffered_s=stall.suffered_s,
            stall_caused_s=stall.caused_s,
        )
