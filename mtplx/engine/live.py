"""What the engine tells those who watch it: each iteration, when it is over.

Nothing is recorded while nobody watches; an iteration then costs one question. Who
watches is told by a call that must not block, and keeps as much of it as it wants.
Engine thread.
"""

from __future__ import annotations

from mtplx.scheduler.step import Step, StepResult
from mtplx.types import LiveIteration, LiveSink, LiveSpan


class LiveRecorder:
    """Those who watch an engine, and what is to be known of its streams for them."""

    def __init__(self) -> None:
        self._sinks: list[LiveSink] = []
        # When each stream's last token was out, by model and request.
        self._told_s: dict[str, dict[str, float]] = {}
        # The streams of each model whose tokens were under way when its last step ended.
        self._ahead: dict[str, frozenset[str]] = {}

    @property
    def watched(self) -> bool:
        """Somebody watches."""
        return bool(self._sinks)

    def attach(self, sink: LiveSink) -> None:
        """Tell ``sink`` from now on."""
        self._sinks.append(sink)

    def detach(self, sink: LiveSink) -> None:
        """Tell it no more; one that is not attached is ignored."""
        if sink in self._sinks:
            self._sinks.remove(sink)
        if not self._sinks:
            self._told_s.clear()
            self._ahead.clear()

    def iterated(
        self,
        model: str,
        number: int,
        step: Step,
        result: StepResult,
        *,
        begin_s: float,
        took_s: float,
    ) -> None:
        """Tell all of an iteration that is over. Call it only when ``watched``."""
        # The streams' tokens go out when their decode ends, and the first token of a
        # prompt when its tail does.
        told_s = begin_s + (result.decode_s or 0.0)
        before = self._told_s.get(model, {})
        if result.decode_s is not None:
            now = dict.fromkeys(step.decoding, told_s)
        else:
            # What is under way comes with the next step.
            now = {name: before[name] for name in step.decoding if name in before}
        seconds = (*result.span_s, *[None] * (len(step.spans) - len(result.span_s)))
        spans = []
        for span, span_s in zip(step.spans, seconds, strict=True):
            told_s += span_s or 0.0
            if span.is_tail and span_s is not None:
                now[span.request_id] = told_s
            spans.append(
                LiveSpan(
                    span.request_id,
                    span.start,
                    span.end,
                    span.is_tail,
                    span.shared,
                    span_s,
                )
            )
        # Every stream is in every iteration, so what is not in this one is over.
        self._told_s[model] = now
        ahead = self._ahead.get(model, frozenset())
        self._ahead[model] = frozenset(step.decoding if result.under_way else ())
        gaps_s: tuple[float | None, ...] = (None,) * len(step.decoding)
        if result.decode_s is not None:
            # Two tokens come where one was under way and no more is: their mean.
            together = frozenset() if result.under_way else ahead
            gaps_s = tuple(
                (now[name] - before[name]) / (2 if name in together else 1)
                if name in before
                else None
                for name in step.decoding
            )
        told = LiveIteration(
            number=number,
            model=model,
            begin_s=begin_s,
            took_s=took_s,
            decode_s=result.decode_s,
            decoding=step.decoding,
            gaps_s=gaps_s,
            spans=tuple(spans),
            target_s=step.target_s,
            predicted_s=step.predicted_s,
            why=step.why.value,
        )
        for sink in self._sinks:
            sink(told)
