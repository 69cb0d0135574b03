"""The messages of a chat, as OpenAI's clients send them, and as templates read them.

Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic.config import JsonDict, JsonValue

from mtplx.server.fields import (
    CONTENT_PART,
    MESSAGE,
    MISSING,
    TOOL_CALL,
    UNSUPPORTED,
    FieldTable,
    field_error,
    shown,
)
from mtplx.server.requests import INVALID, JsonObject


def _function_type(value: str) -> str:
    if value != "function":
        raise field_error(
            UNSUPPORTED, f"Tools of type {shown(value)} are not supported; send functions."
        )
    return value


FunctionType = Annotated[
    str, AfterValidator(_function_type), WithJsonSchema({"const": "function"})
]


def _part_type(value: str) -> str:
    if value != "text":
        raise field_error(
            UNSUPPORTED,
            f"Content parts of type {shown(value)} are not supported; send text.",
        )
    return value


class ContentPart(JsonObject):
    """One part of a message's content."""

    table: ClassVar[FieldTable] = CONTENT_PART

    type: Annotated[str, AfterValidator(_part_type), WithJsonSchema({"const": "text"})]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        None, description="State is kept at the end of this message; the last 4 count."
    )
    cache_control: dict[str, Any] | None = Field(
        None, description="As `prompt_cache_breakpoint`."
    )


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise field_error(
        INVALID, f"`content` must be a string or a list of text parts, not {shown(value)}."
    )


_ROLES = ("system", "user", "assistant", "tool")


def _role(value: str) -> str:
    if value == "developer":
        return "system"
    if value == "function":
        raise field_error(
            UNSUPPORTED, 'Messages of role "function" are not supported; send role "tool".'
        )
    if value not in _ROLES:
        raise field_error(
            INVALID,
            f"Unknown role {shown(value)}; use system, developer, user, assistant or tool.",
        )
    return value


class EarlierFunction(JsonObject):
    """What an earlier answer called."""

    name: str
    arguments: str = Field("", description="JSON text.")


class EarlierCall(JsonObject):
    """A call in an earlier answer."""

    table: ClassVar[FieldTable] = TOOL_CALL

    id: str
    type: FunctionType = "function"
    function: EarlierFunction


def _kind(
    roles: list[JsonValue], required: list[JsonValue], **fields: JsonDict
) -> JsonDict:
    return {"properties": {"role": {"enum": roles}, **fields}, "required": required}


_SAYS: JsonDict = {"type": ["string", "array"]}
_CALLS: JsonDict = {"type": "array", "minItems": 1}
_NO_CALLS: JsonDict = {"enum": [None, []]}
_NULL: JsonDict = {"type": "null"}
# What ``Message._check_role`` holds, as JSON schemas of which one is to match.
_KINDS: list[JsonValue] = [
    _kind(
        ["system", "developer", "user"],
        ["content"],
        content=_SAYS,
        tool_calls=_NO_CALLS,
        tool_call_id=_NULL,
    ),
    _kind(["assistant"], ["content"], content=_SAYS, tool_call_id=_NULL),
    _kind(["assistant"], ["tool_calls"], tool_calls=_CALLS, tool_call_id=_NULL),
    _kind(
        ["tool"],
        ["content", "tool_call_id"],
        content=_SAYS,
        tool_calls=_NO_CALLS,
        tool_call_id={"type": "string"},
    ),
]


class Message(JsonObject):
    """One message of a chat. ``developer`` means ``system``; text parts are joined."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _KINDS})
    table: ClassVar[FieldTable] = MESSAGE

    role: Annotated[
        str,
        AfterValidator(_role),
        WithJsonSchema({"enum": [*_ROLES, "developer"]}),
    ]
    content: Annotated[
        list[ContentPart] | None,
        BeforeValidator(_parts, json_schema_input_type=str | list[ContentPart]),
    ] = Field(None, description="May be absent beside `tool_calls`.")
    name: str | None = None
    reasoning_content: str | None = Field(None, description="What was thought before.")
    reasoning: str | None = Field(None, description="As `reasoning_content`.")
    tool_calls: list[EarlierCall] = Field([], description="Calls of an earlier answer.")
    tool_call_id: str | None = Field(None, description="The call that `content` answers.")

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise field_error(MISSING, "`content` is required.", "content")
        if self.tool_calls and self.role != "assistant":
            raise field_error(
                INVALID, "Only a message of role assistant has `tool_calls`.", "tool_calls"
            )
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise field_error(
                INVALID,
                "A message of role tool, and no other, names its call in `tool_call_id`.",
                "tool_call_id",
            )
        return self

    @property
    def is_breakpoint(self) -> bool:
        """State is to be kept where it ends."""
        return any(
            part.prompt_cache_breakpoint is not None or part.cache_control is not None
            for part in self.content or ()
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        message: dict[str, Any] = {
            "role": self.role,
            "content": "".join(part.text for part in self.content or ()),
        }
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message | {
            name: value
            for name in ("name", "tool_call_id")
            if (value := getattr(self, name)) is not None
        }
