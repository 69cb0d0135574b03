"""From the events of a turn to Anthropic's message, whole or as a stream.

``Answer`` is both: it yields the events of the stream and grows the content that they
spell, so that the two cannot differ. One block is open at a time; a piece of another kind
closes it. White space before the first word of a text is held back until the word comes:
a text without words may not be sent back, so none is sent out.

A stream begins before anything is read. Its ``message_start`` can only say how long the
prompt is; what of it was restored is told by ``message_delta``, whose counts replace it.
Owned by the task that answers; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from mtplx.server.messages.shapes import (
    AnthropicAnswer,
    AnthropicUsage,
    CacheDiagnostics,
    Content,
    StopReason,
)
from mtplx.server.messages.thinking import signature
from mtplx.server.responses import report
from mtplx.server.turn import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
)

StreamEvent = dict[str, Any]


class Answer:
    """One answer on its way.

    Args:
        message_id: Its id.
        model: The name it is given under.
        max_tokens: The longest answer that was asked for.
        show_thinking: Whether the text of the thinking is shown.
        diagnostics: Why the prompt is not restored as far as it might be.
        notes: What the `mtplx` object says besides the metrics.
    """

    def __init__(
        self,
        message_id: str,
        model: str,
        max_tokens: int,
        *,
        show_thinking: bool = True,
        diagnostics: CacheDiagnostics | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        self._id = message_id
        self._model = model
        self._max_tokens = max_tokens
        self._show_thinking = show_thinking
        self._diagnostics = diagnostics
        self._notes = notes or {}
        self._content: list[Content] = []
        self._open: Content | None = None
        self._pieces: list[str] = []
        self._space = ""

    def start(self, prompt_tokens: int) -> StreamEvent:
        """Return the first event."""
        message = self._message(_usage(prompt_tokens, 0, 0, 0))
        return {"type": "message_start", "message": message}

    def push(self, event: TurnEvent) -> list[StreamEvent]:
        """Return the events for one of the turn's."""
        return list(self._events(event))

    def whole(self, end: TurnEnd) -> AnthropicAnswer:
        """Return the message, once ``end`` has been pushed."""
        message = self._message(_usage_of(end))
        message["stop_reason"], message["stop_sequence"] = self._stop(end)
        message["mtplx"] = self._report(end)
        return message

    def _events(self, event: TurnEvent) -> Iterator[StreamEvent]:
        match event:
            case ReasoningPart(text) if text:
                yield from self._thinking(text)
            case TextPart(text) if text:
                yield from self._text(text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin(
                    {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                )
            case ToolCallArguments(_, text) if text:
                yield self._delta(text, {"type": "input_json_delta", "partial_json": text})
            case TurnEnd():
                yield from self._close()
                reason, sequence = self._stop(event)
                yield {
                    "type": "message_delta",
                    "delta": {"stop_reason": reason, "stop_sequence": sequence},
                    "usage": _usage_of(event),
                    "mtplx": self._report(event),
                }
                yield {"type": "message_stop"}

    def _thinking(self, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if self._show_thinking:
            yield self._delta(text, {"type": "thinking_delta", "thinking": text})
        else:
            self._pieces.append(text)

    def _text(self, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open["type"] != "text":
            self._space += text
            if self._space.isspace():
                return
            text = self._space
            yield from self._begin({"type": "text", "text": ""})
        yield self._delta(text, {"type": "text_delta", "text": text})

    def _begin(self, block: Content) -> Iterator[StreamEvent]:
        yield from self._close()
        self._open, self._space = block, ""
        yield {
            "type": "content_block_start",
            "index": len(self._content),
            "content_block": dict(block),
        }

    def _delta(self, text: str, delta: Mapping[str, str]) -> StreamEvent:
        self._pieces.append(text)
        return {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _close(self) -> Iterator[StreamEvent]:
        block, text = self._open, "".join(self._pieces)
        self._open, self._pieces = None, []
        if block is None:
            return
        index = len(self._content)
        match block["type"]:
            case "text":
                block["text"] = text
            case "thinking":
                block["thinking"] = text if self._show_thinking else ""
                block["signature"] = signature(text, shown=self._show_thinking)
                delta = {"type": "signature_delta", "signature": block["signature"]}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            case "tool_use":
                block["input"] = _arguments(text)
        self._content.append(block)
        yield {"type": "content_block_stop", "index": index}

    def _message(self, usage: AnthropicUsage) -> AnthropicAnswer:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "diagnostics": self._diagnostics,
        }

    def _stop(self, end: TurnEnd) -> tuple[StopReason, str | None]:
        if end.reason == "tool_calls":
            return "tool_use", None
        if end.reason == "length":
            cut_short = end.finished.completion_tokens < self._max_tokens
            return "model_context_window_exceeded" if cut_short else "max_tokens", None
        if end.stop_sequence is not None:
            return "stop_sequence", end.stop_sequence
        return "end_turn", None

    def _report(self, end: TurnEnd) -> dict[str, Any]:
        return {**report(end.finished), **self._notes}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of one that was cut off, what was complete."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage_of(end: TurnEnd) -> AnthropicUsage:
    finished, metrics = end.finished, end.finished.metrics
    assert metrics is not None
    return _usage(
        metrics.new_prefill_tokens,
        metrics.cached_tokens,
        finished.completion_tokens,
        end.reasoning_tokens,
    )


def _usage(new: int, cached: int, written: int, thought: int) -> AnthropicUsage:
    return {
        "input_tokens": new,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": written,
        "output_tokens_details": {"thinking_tokens": thought},
    }
