"""Items as the messages that chat templates read.

What the model wrote in one go (reasoning, then text, then calls) is several items and one
message: templates render it so, and the next prompt then begins like the last one went
on. Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtplx.server.responses_api.store import Item


def chat_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the messages that wire ``items`` amount to.

    A call that was cut off is left out: it was never made. The output of a call comes
    after it; ``read.py`` has seen to that.
    """
    chat = _Chat()
    for item in items:
        chat.add(item)
    return chat.messages


class _Chat:
    """The messages so far, and the names of the calls in them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None  # The model's message, while it grows.
        self._names: dict[str, str] = {}

    def add(self, item: Item) -> None:
        match item["type"]:
            case "reasoning":
                self._answer = None
                if text := _text(item):
                    self._begin()["reasoning_content"] = text
            case "message" if item["role"] == "assistant":
                answer = self._answer
                if answer is None or answer["content"] or "tool_calls" in answer:
                    answer = self._begin()
                answer["content"] = _text(item)
            case "message":
                self._answer = None
                role = "system" if item["role"] == "developer" else item["role"]
                self.messages.append({"role": role, "content": _text(item)})
            case "function_call" if item["status"] != "incomplete":
                self._call(item)
            case "function_call_output":
                self._answer = None
                self.messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item["call_id"],
                        "name": self._names[item["call_id"]],
                        "content": item["output"],
                    }
                )

    def _begin(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": ""}
        self.messages.append(self._answer)
        return self._answer

    def _call(self, item: Item) -> None:
        self._names[item["call_id"]] = item["name"]
        answer = self._begin() if self._answer is None else self._answer
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)


def _text(item: Item) -> str:
    return "".join(part["text"] for part in item["content"])
