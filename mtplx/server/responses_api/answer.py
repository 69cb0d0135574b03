"""An answer as output items, and the events that tell a client how they grow.

Turn events go in and wire events come out; ``items`` holds what is complete. One item is
open at a time: a piece of another kind closes it and opens the next. Nothing that was
yielded is changed later. Events lack only their ``sequence_number``, which the stream
adds. Runs on the event loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from mtplx.server.interfaces import PromptRenderer
from mtplx.server.logprobs import ChatTokenLogprob, chat_logprobs
from mtplx.server.responses_api.objects import is_json_object
from mtplx.server.turn import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    TurnEvent,
)

WireEvent = dict[str, Any]
ItemStatus = Literal["completed", "incomplete"]


class Answer:
    """The output of one response.

    Args:
        name: Unique; the ids of the items contain it.
        tokenizer: Spells the tokens of log probabilities.

    Attributes:
        items: Those that are complete, in order.
    """

    def __init__(self, name: str, tokenizer: PromptRenderer) -> None:
        self.items: list[dict[str, Any]] = []
        self._name = name
        self._tokenizer = tokenizer
        self._open: _Growing | None = None

    def add(self, event: TurnEvent) -> Iterator[WireEvent]:
        """Take one event of the turn. Its end is for ``end``, its progress for nobody."""
        match event:
            case TextPart(text, logprobs) if text or logprobs:
                if not isinstance(self._open, _Message):
                    yield from self._begin(_Message(*self._place("msg")))
                spelled = chat_logprobs(self._tokenizer, logprobs)["content"]
                yield self._grow(text, spelled)
            case ReasoningPart(text) if text:
                if not isinstance(self._open, _Reasoning):
                    yield from self._begin(_Reasoning(*self._place("rs")))
                yield self._grow(text)
            case ToolCallStart(_, call_id, name):
                yield from self._begin(_Call(*self._place("fc"), call_id, name))
            case ToolCallArguments(_, text) if text:
                yield self._grow(text)

    def add_empty_message(self) -> Iterator[WireEvent]:
        """Add a message without text: what clients expect where nothing was said."""
        yield from self._begin(_Message(*self._place("msg")))
        yield from self.end("completed")

    def end(self, status: ItemStatus) -> Iterator[WireEvent]:
        """Close the open item, which is complete or was cut off."""
        if self._open is None:
            return
        yield from self._open.closing()
        item = self._open.item(self._open.last_status(status))
        yield self._open.item_event("done", item)
        self.items.append(item)
        self._open = None

    def _place(self, prefix: str) -> tuple[str, int]:
        index = len(self.items) + (self._open is not None)
        return f"{prefix}_{self._name}{index:02x}", index

    def _begin(self, item: _Growing) -> Iterator[WireEvent]:
        yield from self.end("completed")
        self._open = item
        yield from item.opening()

    def _grow(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> WireEvent:
        assert self._open is not None
        return self._open.grow(text, logprobs)


class _Growing(ABC):
    """The item that is open."""

    def __init__(self, item_id: str, output_index: int) -> None:
        self.item_id = item_id
        self.output_index = output_index
        self.logprobs: list[ChatTokenLogprob] = []
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has come so far."""
        return "".join(self._pieces)

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""

    def last_status(self, status: ItemStatus) -> ItemStatus:
        """Return the status to end with where the whole answer ends with ``status``."""
        return status

    @abstractmethod
    def opening(self) -> Iterator[WireEvent]:
        """Tell that it begins."""

    @abstractmethod
    def delta(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> WireEvent:
        """Tell of a new piece."""

    @abstractmethod
    def closing(self) -> Iterator[WireEvent]:
        """Tell its whole content; what comes then is ``output_item.done``."""

    def grow(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> WireEvent:
        """Add a piece, and tell of it."""
        self._pieces.append(text)
        self.logprobs += logprobs
        return self.delta(text, logprobs)

    def event(self, kind: str, **fields: Any) -> WireEvent:
        """Return an event about the inside of this item."""
        place = {"item_id": self.item_id, "output_index": self.output_index}
        return {"type": f"response.{kind}", **place, **fields}

    def item_event(self, kind: str, item: dict[str, Any]) -> WireEvent:
        """Return an event about the whole item."""
        name = f"response.output_item.{kind}"
        return {"type": name, "output_index": self.output_index, "item": item}


class _TextItem(_Growing):
    """An item with one part, which is text."""

    part_type: ClassVar[str]

    def part(self) -> dict[str, Any]:
        return {"type": self.part_type, "text": self.text}

    def opening(self) -> Iterator[WireEvent]:
        yield self.item_event("added", {**self.item("in_progress"), "content": []})
        yield self.event("content_part.added", content_index=0, part=self.part())

    def delta(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> WireEvent:
        return self.event(f"{self.part_type}.delta", content_index=0, delta=text)

    def closing(self) -> Iterator[WireEvent]:
        yield self.event(f"{self.part_type}.done", content_index=0, text=self.text)
        yield self.event("content_part.done", content_index=0, part=self.part())


class _Reasoning(_TextItem):
    part_type = "reasoning_text"

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self.part()],
        }


class _Message(_TextItem):
    part_type = "output_text"

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self.part()],
        }

    def part(self) -> dict[str, Any]:
        return {**super().part(), "annotations": [], "logprobs": list(self.logprobs)}

    def delta(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> WireEvent:
        return {**super().delta(text, logprobs), "logprobs": list(logprobs)}

    def closing(self) -> Iterator[WireEvent]:
        text_done, part_done = super().closing()
        yield {**text_done, "logprobs": list(self.logprobs)}
        yield part_done


class _Call(_Growing):
    def __init__(self, item_id: str, output_index: int, call_id: str, name: str) -> None:
        super().__init__(item_id, output_index)
        self.call_id = call_id
        self.name = name

    def item(self, status: str) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "type": "function_call",
            "status": status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
        }

    def last_status(self, status: ItemStatus) -> ItemStatus:
        # A call is complete once its arguments are, however the answer went on.
        return "completed" if is_json_object(self.text) else "incomplete"

    def opening(self) -> Iterator[WireEvent]:
        yield self.item_event("added", self.item("in_progress"))

    def delta(self, text: str, logprobs: Sequence[ChatTokenLogprob]) -> WireEvent:
        return self.event("function_call_arguments.delta", delta=text)

    def closing(self) -> Iterator[WireEvent]:
        yield self.event(
            "function_call_arguments.done", name=self.name, arguments=self.text
        )
