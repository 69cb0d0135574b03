"""The items of a conversation as clients send them.

Each is validated by a class of this file, and ``wire`` turns it into the form that
answers, listings and the store share. Items of the answer are made in ``answer.py``.
Pure; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from mtplx.server.fields import FieldTable
from mtplx.server.requests import JsonObject
from mtplx.server.responses_api.objects import arguments_text, variants

_OWN = {"id": "the server names what it keeps", "created_by": "as `id`"}
_WHOLE = {"status": "what comes in is complete"}
_CALLED_DIRECTLY = {"caller": ({"type": "direct"},), "namespace": ()}


class InputText(JsonObject):
    """A piece of a message's text."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={
            "annotations": "clients echo an answer's citations; they are not its text",
            "logprobs": "clients echo them; they are not its text",
            "parsed": "the SDK's own reading of the text",
            "prompt_cache_breakpoint": "a hint; every prefix is kept anyway",
        }
    )

    type: Literal["input_text", "output_text"]
    text: str


class ReasoningText(JsonObject):
    """A piece of what the model thought."""

    type: Literal["reasoning_text"]
    text: str


_TextPart = Annotated[
    InputText,
    PlainValidator(
        variants("content part", {"input_text": InputText, "output_text": InputText}),
        json_schema_input_type=InputText,
    ),
]


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Content = Annotated[
    list[_TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[InputText])
]


def _joined(parts: Sequence[InputText]) -> str:
    return "".join(part.text for part in parts)


class MessageItem(JsonObject):
    """A message. ``type`` may be left out."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={**_OWN, **_WHOLE, "phase": "the template makes no difference"}
    )

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"] = Field(
        description="`developer` means `system`."
    )
    content: _Content = Field(description="Text, or text parts, which are joined.")

    def wire(self, name: str) -> dict[str, Any]:
        """Return the item as it is kept; ``name`` becomes the end of its id."""
        part: dict[str, Any] = {"type": "input_text", "text": _joined(self.content)}
        if self.role == "assistant":
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        return {
            "id": f"msg_{name}",
            "type": "message",
            "status": "completed",
            "role": self.role,
            "content": [part],
        }


class FunctionCallItem(JsonObject):
    """A call the model made."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={
            **_OWN,
            "parsed_arguments": "the SDK's own reading of the arguments",
        },
        refused={**_CALLED_DIRECTLY, "async": (False,)},
    )

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, description="Names the call; its output repeats it.")
    name: str = Field(min_length=1, description="Of the function.")
    arguments: Annotated[str, AfterValidator(arguments_text)] = Field(
        description="A JSON object as text."
    )
    status: Literal["in_progress", "completed", "incomplete"] = Field(
        "completed", description="An incomplete call was never made."
    )

    def wire(self, name: str) -> dict[str, Any]:
        """Return the item as it is kept; ``name`` becomes the end of its id."""
        return {
            "id": f"fc_{name}",
            "type": "function_call",
            "status": self.status,
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionCallOutputItem(JsonObject):
    """What a call gave back."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={**_OWN, **_WHOLE, "name": "`call_id` says which call it was"},
        refused=_CALLED_DIRECTLY,
    )

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, description="Of the call it belongs to.")
    output: _Content = Field(description="Text, or text parts, which are joined.")

    def wire(self, name: str) -> dict[str, Any]:
        """Return the item as it is kept; ``name`` becomes the end of its id."""
        return {
            "id": f"fco_{name}",
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": _joined(self.output),
        }


class ReasoningItem(JsonObject):
    """What the model thought before it answered."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={
            **_OWN,
            **_WHOLE,
            "encrypted_content": "reasoning travels in the clear, in `content`",
            "summary": "as `encrypted_content`",
        }
    )

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field([], description="Parts, which are joined.")

    def wire(self, name: str) -> dict[str, Any]:
        """Return the item as it is kept; ``name`` becomes the end of its id."""
        text = "".join(part.text for part in self.content)
        return {
            "id": f"rs_{name}",
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }


class ItemReference(JsonObject):
    """An item of a stored response, by its id. ``type`` may be left out."""

    type: Literal["item_reference"] = "item_reference"
    id: str = Field(description="Of an item of a stored response.")


def _item_type(value: Mapping[str, Any]) -> str | None:
    if "role" in value:
        return "message"
    return "item_reference" if "id" in value else None


AnyItem = (
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference
)
InputItem = Annotated[
    AnyItem,
    PlainValidator(
        variants(
            "input item",
            {
                "message": MessageItem,
                "function_call": FunctionCallItem,
                "function_call_output": FunctionCallOutputItem,
                "reasoning": ReasoningItem,
                "item_reference": ItemReference,
            },
            _item_type,
        ),
        json_schema_input_type=AnyItem,
    ),
]
