"""One request on the engine thread: its prefill, its tokens, its text, its end.

It knows how to take its next step and what to tell its client; when it may
take a step is the engine's business. Its last event is ``Finished`` or ``Failed``,
sent exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mtplx.engine.sampling import Sampler
from mtplx.errors import GenerationError, MtplxError
from mtplx.generation import PromptPrefill
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Event, Failed, Finished, FinishReason, GenerationRequest, TextDelta

logger = logging.getLogger(__name__)

EventSink = Callable[[Event], None]


class RunningRequest:
    """A request that has started.

    Args:
        request: What to do.
        on_event: Called on the engine thread; must not block.
        model, tokenizer, bank: The engine's.
        window: Longest prefill span in tokens.
        tail_grid: Grid on which the tail is cut.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: EventSink,
        model: Model,
        tokenizer: Tokenizer,
        bank: SessionBank,
        *,
        window: int,
        tail_grid: int,
    ) -> None:
        self.request = request
        self._on_event = on_event
        self._model = model
        self._end_tokens = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        prompt = request.prompt
        self._room = model.context_length - len(prompt.token_ids)
        self._sampler = Sampler(request.sampling, prompt.token_ids)
        self._text = tokenizer.text_stream(prompt.token_ids, request.stop)
        self._generated: list[int] = []
        self._prefill = PromptPrefill(
            model,
            prompt,
            bank,
            arrival_s=request.arrival_s,
            window=window,
            tail_grid=tail_grid,
        )
        self.ended = False

    def step(self) -> None:
        """Run one span, or one token."""
        if not self._prefill.complete:
            self._prefill.run_span()
            if not self._prefill.complete:
                return
            self._emit_next()
            # The next turn may arrive while this one still decodes.
            self._prefill.store(self.request.prompt.token_ids)
        else:
            last = self._generated[-1]
            self._model.decode(self._prefill.cache, 0, token_ids=(last,))
            self._emit_next()

    def _emit_next(self) -> None:
        """Choose a token, tell the client, and end where it is time to."""
        logits = self._prefill.cache.logits
        assert logits is not None
        token = self._sampler.sample(logits, self._generated)
        if not self._generated:
            self._prefill.clock.first_token_s = time.perf_counter()
        self._generated.append(token)
        is_end = token in self._end_tokens
        full = len(self._generated) >= min(self.request.max_new_tokens, self._room)
        text = "" if is_end else self._text.push(token)
        done = is_end or full or self._text.stopped
        if done:
            # A stop string may show only now, if it waited for a longer one.
            text += self._text.finish()
        self._on_event(TextDelta(text, (token,)))
        if done:
            reason: FinishReason = "stop" if is_end or self._text.stopped else "length"
            self._end(Finished(reason, len(self._generated), self._prefill.metrics()))

    def cancel(self) -> None:
        """End now; what was computed stays in the bank."""
        self._end(Finished("cancelled", len(self._generated), self._prefill.metrics()))

    def fail(self, error: Exception) -> None:
        """End with an error. The cache may be broken, so nothing more is stored."""
        if self.ended:
            return
        if not isinstance(error, MtplxError):
            logger.error("Request %s failed", self.request.request_id, exc_info=error)
            error = GenerationError(f"The model failed on this request: {error}")
        self.ended = True
        self._prefill.release()
        self._on_event(Failed(error))

    def _end(self, event: Finished) -> None:
        self.ended = True
        self._on_event(event)
        # After the client has its end: storing may take a while.
        self._prefill.store((*self.request.prompt.token_ids, *self._generated))
        self._prefill.release()
