"""One request on the engine thread: its prefill, its tokens, its text, its end.

It knows what to tell its client and what to keep of its work; when it may compute is
the scheduler's business, and ``core.py`` does the computing. Its last event is
``Finished`` or ``Failed``, sent exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from mtplx.engine.constraint import Constraint, Grammars
from mtplx.engine.logprobs import PromptScores, Scores, score
from mtplx.engine.sampling import NOT_A_NUMBER, Draw, Sampler
from mtplx.errors import GenerationError, MtplxError, UnsupportedFieldError
from mtplx.generation import PromptPrefill
from mtplx.metrics import StreamMetrics
from mtplx.models import Model
from mtplx.scheduler.itl import ItlRecorder
from mtplx.scheduler.step import Stall
from mtplx.session import Lookup, SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    PrefillProgress,
    PromptLogprobs,
    TextDelta,
)

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
        lookup: Where the bank was asked before.
        grammars: The engine's; None where the tokenizer can't be held to grammars.

    Attributes:
        prefill: The prompt on its way, then the cache that decodes.
        broken: What was computed is no numbers; nothing of it may be kept.

    Raises:
        UnsupportedFieldError: The request has a grammar, and there are no ``grammars``.
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
        state_tokens: int = 0,
        lookup: Lookup | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.request = request
        self._on_event = on_event
        prompt = request.prompt
        self._end_tokens = frozenset() if request.ignore_eos else tokenizer.eos_token_ids
        room = model.context_length - len(prompt.token_ids)
        self._most_tokens = min(request.max_new_tokens, room)
        self._sampler = Sampler(request.sampling, prompt.token_ids)
        self._constraint = _constraint(request, grammars)
        self._scores: Scores | None = None
        self._text = tokenizer.text_stream(prompt.token_ids, request.stop)
        self._generated: list[int] = []
        self._gaps = ItlRecorder(recent=256)
        self._last_token_s: float | None = None
        self._reason: FinishReason | None = None
        self.broken = False
        self._prompt_scores: PromptScores | None = None
        if request.prompt_logprobs:
            self._prompt_scores = PromptScores(prompt.token_ids, request.logprobs or 0)
        self.prefill = PromptPrefill(
            model,
            prompt,
            bank,
            arrival_s=request.arrival_s,
            window=window,
            tail_grid=tail_grid,
            namespace=request.namespace,
            state_tokens=state_tokens,
            score=None if self._prompt_scores is None else self._prompt_scores.add,
            lookup=lookup,
        )

        clock = self.prefill.clock
        if (parting := clock.divergence) is not None:
            clock.divergence = replace(
                parting,
                kept_text=tokenizer.token_text(parting.kept_token),
                sent_text=tokenizer.token_text(parting.sent_token),
            )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.request.prompt.token_ids, *self._generated)

    @property
    def last_token(self) -> int:
        """The token that the next decode reads."""
        return self._generated[-1]

    @property
    def only_reads(self) -> bool:
        """It draws no token: it is done when its prompt is complete."""
        return self._most_tokens == 0

    @property
    def done(self) -> bool:
        """True once its last token is known."""
        if self.only_reads:
            return self.prefill.complete
        return self._reason is not None

    def tell_progress(self) -> None:
        """Tell the client how far its prompt has been read."""
        clock = self.prefill.clock
        self._on_event(
            PrefillProgress(
                done_tokens=self.prefill.cache.offset,
                cached_tokens=clock.cached_tokens,
                prompt_tokens=clock.prompt_tokens,
            )
        )

    def draw(self) -> Draw:
        """Say how the next token is drawn. The token before it must have been accepted.

        Raises:
            GenerationError: The grammar cannot go on.
        """
        allowed = None if self._constraint is None else self._constraint.allowed()
        return Draw(self._sampler, self._generated, allowed)

    def scored(self, logits: mx.array, token: mx.array, tokens: mx.array) -> mx.array:
        """Score a drawn token; for a request that wants it.

        Args:
            logits: ``[1, vocab]``, as the model gave them.
            token: ``[1]``.
            tokens: Those of all rows.

        Returns:
            ``tokens``, such that evaluating them evaluates the scores.
        """
        assert self.request.logprobs is not None
        self._scores = score(logits, token, self.request.logprobs)
        return self._scores.computed_with(tokens)

    def accept(self, token: int, target_s: float | None) -> float | None:
        """Take a drawn token and tell the client.

        Args:
            token: As ``draw_tokens`` gave it.
            target_s: Longest gap between tokens that was aimed at.

        Returns:
            Seconds since the token before; None for the first one.

        Raises:
            GenerationError: The model gave logits that are not numbers, or the grammar
                cannot go on.
        """
        if token == NOT_A_NUMBER:
            self.broken = True
            raise GenerationError(
                "The model produced logits that are not numbers. "
                "Try another dtype, float32 say, or another copy of the model."
            )
        now_s = time.perf_counter()
        gap_s = None if self._last_token_s is None else now_s - self._last_token_s
        if gap_s is None:
            self.prefill.clock.first_token_s = now_s
            self._tell_prompt()
        else:
            self._gaps.record(gap_s, target_s)
        self._last_token_s = now_s
        self._generated.append(token)
        is_end = token in self._end_tokens
        text = "" if is_end else self._text.push(token)
        complete = is_end or (
            self._constraint is not None and self._constraint.advance(token)
        )
        full = len(self._generated) >= self._most_tokens
        if complete or full or self._text.stopped:
            # A stop string may show only now, if it waited for a longer one.
            text += self._text.finish()
            self._reason = "stop" if complete or self._text.stopped else "length"
        logprobs = () if self._scores is None else tuple(self._scores.read())
        self._on_event(TextDelta(text, (token,), logprobs))
        return gap_s

    def end_early(self) -> None:
        """Let the answer end with the tokens it has: there is no memory for more."""
        self._on_event(TextDelta(self._text.finish(), ()))
        self._reason = "length"

    def finish(self, stall: Stall) -> None:
        """Tell the client that its answer is complete."""
        assert self.done
        if self.only_reads:
            self._tell_prompt()
        self._send_end(self._reason or "length", stall)

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
        self.prefill.store(self.token_ids)

    def _tell_prompt(self) -> None:
        if self._prompt_scores is not None:
            assert self._prompt_scores.complete
            self._on_event(PromptLogprobs(tuple(self._prompt_scores.tokens)))

    def _send_end(self, reason: FinishReason, stall: Stall) -> None:
        metrics = self.prefill.metrics()
        stream = None if metrics is None else self._stream_metrics(stall)
        self._on_event(
            Finished(reason, len(self._generated), metrics, stream, self._text.stop_text)
        )

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


def _constraint(request: GenerationRequest, grammars: Grammars | None) -> Constraint | None:
    if request.grammar is None:
        return None
    if grammars is None:
        raise UnsupportedFieldError(
            "Answers of this model can't be held to a schema or a grammar: its tokenizer "
            "does not tell the bytes of its tokens. Send the request without one."
        )
    return grammars.constrain(request.grammar)
