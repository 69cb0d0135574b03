"""Why a prompt cannot be restored as far as the one before it.

A client that asks (`diagnostics` in the body) names the message it got last. This file
remembers, as digests, what the prompts of such clients were made of, and says which part
is another one now. It compares what was asked for, before anything is read; what the
SessionBank then gave back, and why not more, is in the answer's `mtplx` object. Owned by
the event loop.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from mtplx.server.messages.shapes import CacheMissReason
from mtplx.server.turn import TurnRequest

MAX_RECORDS = 1024


@dataclass(frozen=True)
class Part:
    """A digest, and the characters it stands for."""

    digest: bytes
    size: int

    @classmethod
    def of(cls, value: Any) -> Part:
        """Return the part for a JSON value."""
        text = json.dumps(value, sort_keys=True)
        return cls(hashlib.sha256(text.encode()).digest(), len(text))


@dataclass(frozen=True)
class Record:
    """What one prompt was made of.

    Attributes:
        model: Fingerprint of the model that read it.
        system, tools: As they were sent.
        messages: The rest of the conversation, one by one.
        others: What else shapes the prompt.
        prompt_tokens: Its length.
    """

    model: str
    system: Part
    tools: Part
    messages: tuple[Part, ...]
    others: Part
    prompt_tokens: int

    @classmethod
    def of(cls, request: TurnRequest, model: str, prompt_tokens: int) -> Record:
        """Return the record of a turn."""
        system = list(takewhile(lambda each: each["role"] == "system", request.messages))
        return cls(
            model=model,
            system=Part.of(system),
            tools=Part.of(request.tools),
            messages=tuple(Part.of(each) for each in request.messages[len(system) :]),
            others=Part.of([request.tool_choice.mode == "none", request.template_kwargs]),
            prompt_tokens=prompt_tokens,
        )

    def miss_after(self, previous: Record) -> CacheMissReason | None:
        """Return where this prompt leaves ``previous``; None where it only goes on."""
        if self.model != previous.model:
            return previous.missed("model_changed")
        if self.system != previous.system:
            return previous.missed("system_changed")
        if self.tools != previous.tools:
            return previous.missed("tools_changed")
        if self.messages[: len(previous.messages)] != previous.messages:
            pairs = zip(self.messages, previous.messages, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            return previous.missed("messages_changed", shared)
        return None if self.others == previous.others else {"type": "unavailable"}

    def missed(
        self,
        kind: Literal[
            "model_changed", "system_changed", "tools_changed", "messages_changed"
        ],
        shared_messages: int | None = None,
    ) -> CacheMissReason:
        """Return the reason with the tokens of what is not shared, by its share of the
        characters; where no message is, nothing is taken to be shared."""
        parts = [self.tools, self.system, *self.messages]
        first = 0 if shared_messages is None else 2 + shared_messages
        total = sum(part.size for part in parts)
        missed = sum(part.size for part in parts[first:])
        return {
            "type": kind,
            "cache_missed_input_tokens": round(self.prompt_tokens * missed / total),
        }


class Records:
    """The latest records, by the id of the answer. At most ``MAX_RECORDS``."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, Record] = OrderedDict()

    def keep(self, message_id: str, record: Record) -> None:
        """Remember a record, and forget the oldest when there are too many."""
        self._records[message_id] = record
        if len(self._records) > MAX_RECORDS:
            self._records.popitem(last=False)

    def compare(self, record: Record, previous_id: str | None) -> CacheMissReason | None:
        """Return why ``record`` leaves the prompt that ``previous_id`` answered."""
        if previous_id is None:
            return None
        previous = self._records.get(previous_id)
        if previous is None:
            return {"type": "previous_message_not_found"}
        return record.miss_after(previous)
