"""Chooses the prefill spans of one step under its limits in tokens and in time.

One ``SpanChooser`` lives for one ``schedule``. It reads requests and never changes them.
"""

from __future__ import annotations

import math

from mtplx.scheduler.config import SchedulerConfig
from mtplx.scheduler.cost_model import CostModel
from mtplx.scheduler.request import Request
from mtplx.scheduler.step import PrefillSpan, Step, Why


class SpanChooser:
    """Fills a step with spans, prompt by prompt.

    The time left for prefill is the target less the decode that will follow: a stream's
    gap is one step's spans and the next decode. A prompt whose tail was taken is a
    stream from there on, so what follows it in the step is held to the target too.

    Args:
        config: The settings.
        costs: The learned cost of a step.
        rows: Streams that decode in this step.
        depth_tokens: Tokens in their caches, together.
    """

    def __init__(
        self, config: SchedulerConfig, costs: CostModel, *, rows: int, depth_tokens: int
    ) -> None:
        self._config = config
        self._costs = costs
        self._rows = rows
        self._shares = config.spans_share_decodes and rows > 0
        self._depth_tokens = self._decode_depth_tokens = depth_tokens
        self._predicted_s = costs.cost.of_decode(rows, depth_tokens)
        self._target_s: float | None = None
        self._seconds_left = math.inf
        self._tokens_left = config.max_num_batched_tokens - rows
        self._share_left = config.min_prefill_tokens
        self._spans: list[PrefillSpan] = []
        self._why: Why | None = None
        self._hold_to_target()

    def take(self, request: Request) -> None:
        """Take spans of a prompt, as many as there is room for."""
        start = request.num_computed_tokens
        own_end = start + self._most_tokens_of_one_prompt
        while start < request.prompt_tokens:
            room = max(0, min(self._longest_span, self._tokens_left, own_end - start))
            end = self._next_end(request, start, room)
            if end is None:
                return
            self._add(request, start, end)
            if end - start > room:
                self._tokens_left = 0
                self._why = Why.WHOLE_PIECE
            start = end

    def step(self, decoding: tuple[str, ...]) -> Step:
        """Return the finished step."""
        complete = Why.ALL_SCHEDULED if self._spans else Why.NOTHING_TO_PREFILL
        return Step(
            decoding=decoding,
            decode_depth_tokens=self._decode_depth_tokens,
            spans=tuple(self._spans),
            why=self._why or complete,
            target_s=self._target_s,
            predicted_s=self._predicted_s,
        )

    @property
    def _longest_span(self) -> int:
        config = self._config
        chunked = config.enable_chunked_prefill
        return config.prefill_window if chunked else config.max_num_batched_tokens

    @property
    def _most_tokens_of_one_prompt(self) -> int:
        config = self._config
        threshold = (
            config.long_prefill_token_threshold if config.enable_chunked_prefill else 0
        )
        return threshold or config.max_num_batched_tokens

    def _is_shared(self, request: Request) -> bool:
        """The next span goes into the forward of the decodes, if it is of ``request``."""
        return self._shares and not self._spans and not request.alone

    def _next_end(self, request: Request, start: int, room: int) -> int | None:
        """Return the end of the next span, or None where none should follow."""
        in_time = room
        if self._seconds_left < math.inf:
            in_time = self._costs.span_within(
                self._seconds_left, start, room, shared=self._is_shared(request)
            )
        share = min(room, self._share_left)
        allowed = max(in_time, share)
        end = request.next_end(start, allowed, max(share, friendly_length(allowed)))
        if end - start > allowed:
            fits = not self._spans or (share > 0 and end - start <= room)
        else:
            # A forward has a price of its own: crumbs wait for the next step.
            left = request.prompt_tokens - start
            worthwhile = min(self._config.min_prefill_tokens, self._longest_span, left)
            fits = share > 0 or allowed >= worthwhile
        if not fits or end - start > in_time:
            limit = Why.GUARANTEED_SHARE if fits else Why.ITL_TARGET
            self._why = self._why or (limit if in_time < room else Why.TOKEN_BUDGET)
        return end if fits else None

    def _add(self, request: Request, start: int, end: int) -> None:
        tail = end == request.prompt_tokens
        shared = self._is_shared(request)
        self._spans.append(PrefillSpan(request.request_id, start, end, tail, shared))
        seconds = self._costs.cost.of_span(start, end - start, shared=shared)
        self._predicted_s += seconds
        self._seconds_left -= seconds
        self._tokens_left -= end - start
        self._share_left = max(0, self._share_left - (end - start))
        if tail:
            self._rows += 1
            self._depth_tokens += request.prompt_tokens
            self._hold_to_target()

    def _hold_to_target(self) -> None:
        """Leave prefill the time that the target leaves, where streams decode."""
        decode_s = self._costs.cost.of_decode(self._rows, self._depth_tokens)
        target_s, relative = self._config.target_itl_s, self._config.relative_itl_target
        if target_s is None and relative is not None:
            target_s = relative * decode_s
        if self._rows == 0 or target_s is None:
            return
        if self._target_s is None:
            self._target_s = target_s
        seconds = target_s / self._costs.margin - decode_s
        self._seconds_left = min(self._seconds_left, seconds)


def friendly_length(tokens: int) -> int:
    """Round a length down by at most a sixteenth, so that few lengths occur.

    Each length is a shape that a GPU backend plans or compiles anew.
    """
    grid = 1 << max(0, (tokens // 16).bit_length() - 1)
    return tokens - tokens % grid
