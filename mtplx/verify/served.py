"""The way of a served prompt: the engine's own core, with several requests at once.

Two streams run. The prompt comes, is read beside them, and comes once more while it is
read; then the next turn of its conversation. The tokens are the engine's own, so a
request is compared up to its first flip. Runs on the thread that owns MLX, and is its
engine for that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.metrics import PrefillMetrics
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TextDelta,
    TokenLogprob,
)
from mtplx.verify.checks import NotPossibleError, NotReachedError, require
from mtplx.verify.reference import Reference, Tally
from mtplx.verify.ways import Reach

_COMPARED_TOP = 20


@dataclass
class _Client:
    """What one request was sent."""

    chosen: list[TokenLogprob] = field(default_factory=list)
    end: Finished | Failed | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self.chosen += event.logprobs
        elif isinstance(event, Finished | Failed):
            self.end = event

    @property
    def metrics(self) -> PrefillMetrics:
        """What its prompt cost, once it is over."""
        if isinstance(self.end, Failed):
            raise NotReachedError(f"A request failed: {self.end.error}")
        assert self.end is not None
        assert self.end.metrics is not None
        return self.end.metrics


class Served:
    """An engine core and its clients.

    Args:
        model: Under test.
        reference: What must come out.
        window: Longest span in tokens.
        overlaps: The next step begins before the tokens of the last one are read.
    """

    def __init__(
        self, model: Model, reference: Reference, window: int, *, overlaps: bool
    ) -> None:
        if model.tokenizer is None:
            raise NotPossibleError("The engine needs a tokenizer, and the model has none.")
        self._reference = reference
        self._core = EngineCore(
            model,
            Tokenizer(model.tokenizer),
            SessionBank(),
            Settings.model_validate({"prefill_window": window, "overlap_decode": overlaps}),
        )
        if overlaps and not self._core.decoder.forms_groups:
            raise NotPossibleError("What was computed ahead could not be dropped.")
        self._overlaps = overlaps
        self._clients: dict[str, _Client] = {}

    def run(self, tally: Tally) -> Reach:
        """Send the requests, and compare those of the prompt."""
        prompt, tokens = self._reference.prompt, self._reference.tokens
        streams = [
            self._send(f"stream {length}", prompt[:length], len(tokens))
            for length in (3, len(prompt) // 4)
        ]
        self._iterate_until(lambda: all(each.chosen or each.end for each in streams))
        first = self._send("first", prompt, len(tokens) - len(prompt))
        self._core.iterate()
        second = self._send("second", prompt, len(tokens) - len(prompt))
        self._iterate_until(lambda: bool(first.end and second.end))
        for name in self._clients:
            self._core.cancel(name)
        spans = first.metrics.prefill_chunks
        restored = second.metrics.cached_tokens
        for client in (first, second):
            self._compare(tally, client, len(prompt))
        reach: dict[str, int | str] = {
            "requests at once": len(self._clients),
            "mode": self._core.decoder.mode,
            "spans": spans,
            "restored tokens": restored,
        }
        # A model that must be read whole has neither, nor a next turn that is one pass.
        if self._core.chunking_problem is None:
            require(spans > 1, "The prompt was not split.")
            require(restored > 0, "The second request restored nothing.")
            reach["restored by the next turn"] = self._next_turn(tally)
        overlapped = self._core.overlapped_steps
        require(not self._overlaps or overlapped > 0, "No step was overlapped.")
        return {
            **reach,
            "iterations": self._core.iterations,
            "overlapped steps": overlapped,
        }

    def _next_turn(self, tally: Tally) -> int:
        """Go on from the middle of the answer; return the tokens that were restored."""
        prompt, tokens = self._reference.prompt, self._reference.tokens
        turn = tokens[: (len(prompt) + len(tokens)) // 2]
        client = self._send("next turn", turn, len(tokens) - len(turn))
        self._iterate_until(lambda: client.end is not None)
        restored = client.metrics.cached_tokens
        require(restored > 0, "The next turn restored nothing.")
        self._compare(tally, client, len(turn))
        return restored

    def _send(self, name: str, token_ids: Sequence[int], new_tokens: int) -> _Client:
        client = self._clients[name] = _Client()
        request = GenerationRequest(
            request_id=name,
            prompt=Prompt(tuple(token_ids)),
            max_new_tokens=new_tokens,
            arrival_s=time.perf_counter(),
            sampling=SamplingParams(temperature=0),
            ignore_eos=True,
            logprobs=_COMPARED_TOP,
        )
        self._core.add(request, client)
        return client

    def _iterate_until(self, done: Callable[[], bool]) -> None:
        while not done():
            require(not self._core.idle, "The engine had nothing to do before the end.")
            self._core.iterate()

    def _compare(self, tally: Tally, client: _Client, start: int) -> None:
        expected = self._reference.tokens[start:]
        for step, (chosen, token) in enumerate(zip(client.chosen, expected, strict=True)):
            tally.add_chosen(start + step - 1, chosen)
            if chosen.token_id != token:
                return  # What follows another token is another answer.
