"""The bodies of ``/v1/messages`` and ``/v1/messages/count_tokens``.

Strict, like the other routes' bodies; fields that are not declared here go through the
tables of ``messages/fields.py``. Blocks that are no text (images, documents, results of
tools that run at the provider) are refused by their type. What the fields mean as a chat
is ``translate.py``'s business. Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from mtplx.server.chat_body import ToolName
from mtplx.server.fields import UNSUPPORTED, FieldTable, field_error, shown
from mtplx.server.messages import fields
from mtplx.server.requests import INVALID, JsonObject, Stop
from mtplx.types import SamplingParams

Json = dict[str, Any]
Effort = Literal["low", "medium", "high", "xhigh", "max"]


class _Markable(JsonObject):
    """A block that may say that state is worth keeping at its end."""

    cache_control: Json | None = Field(
        None, description="State is kept at the end of the message."
    )


class TextBlock(_Markable):
    """Text of any role."""

    table: ClassVar[FieldTable] = fields.TEXT

    type: Literal["text"]
    text: str


class ThinkingBlock(JsonObject):
    """What the model thought, echoed back. Any signature is accepted."""

    type: Literal["thinking"]
    thinking: str
    signature: str = Field("", description="Any is accepted; see `thinking.display`.")


class RedactedThinkingBlock(JsonObject):
    """Thinking that only Anthropic can read; there is nothing in it for this model."""

    type: Literal["redacted_thinking"]
    data: str = Field(description="Read past: it holds nothing for this model.")


class ToolUseBlock(_Markable):
    """A call that the model made."""

    table: ClassVar[FieldTable] = fields.TOOL_USE

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: Json


def _only(*types: str) -> BeforeValidator:
    """Refuse by name the blocks of other types."""

    def check(block: Any) -> Any:
        if isinstance(block, dict) and (kind := block.get("type")) not in types:
            raise field_error(
                UNSUPPORTED,
                f"Blocks of type {shown(kind)} are not supported here; "
                f"send {' or '.join(types)}.",
                "type",
            )
        return block

    return BeforeValidator(check)


def _blocks(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise field_error(
        INVALID, f"This must be a string or a list of blocks, not {shown(value)}."
    )


Texts = Annotated[
    list[Annotated[TextBlock, _only("text")]],
    BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(_Markable):
    """What a call returned."""

    table: ClassVar[FieldTable] = fields.TOOL_RESULT

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([], description="Text, or blocks of text.")
    is_error: bool = Field(False, description="The model reads `Error:` before the text.")


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
_BLOCKS_OF = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_ALL_BLOCKS = sorted({kind for kinds in _BLOCKS_OF.values() for kind in kinds})


class AnthropicMessage(JsonObject):
    """One message. ``system`` may stand anywhere, and stays there."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Annotated[Block, _only(*_ALL_BLOCKS)]],
        BeforeValidator(_blocks, json_schema_input_type=str | list[Block]),
    ]

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        for block in self.content:
            if block.type not in _BLOCKS_OF[self.role]:
                raise field_error(
                    INVALID,
                    f"A message of role `{self.role}` cannot have `{block.type}` blocks.",
                    "content",
                )
        return self


class AnthropicTool(JsonObject):
    """A tool that the client runs."""

    table: ClassVar[FieldTable] = fields.TOOL

    type: Annotated[str, WithJsonSchema({"const": "custom"})] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: Json = Field(description="JSON schema of the arguments.")
    strict: bool = Field(False, description="Arguments match the schema for certain.")

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, tool: Any) -> Any:
        # Before the fields: those of another type of tool are not known here.
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise field_error(
                UNSUPPORTED,
                f"Tools of type {shown(kind)} are not supported; "
                "describe the tool by `name` and `input_schema`.",
                "type",
            )
        return tool


class AnthropicToolChoice(JsonObject):
    """Which tool the answer may, or must, call."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description="`any` and `tool` make the model call one."
    )
    name: str | None = Field(None, description="With `tool`, the one to call.")
    disable_parallel_tool_use: bool = Field(False, description="One call at most.")


class ThinkingConfig(JsonObject):
    """Whether the model thinks before it answers."""

    table: ClassVar[FieldTable] = fields.THINKING

    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="For the chat template; the first two are the same."
    )
    display: Literal["summarized", "omitted"] = Field(
        "summarized",
        description="`omitted` puts the text into the signature, out of sight.",
    )


class JsonOutputFormat(JsonObject):
    """What the answer's text must match."""

    type: Literal["json_schema"]
    json_schema: Json = Field(alias="schema")


class OutputConfig(JsonObject):
    """How the answer is to be."""

    table: ClassVar[FieldTable] = fields.OUTPUT_CONFIG

    effort: Effort | None = Field(default=None, description="For the chat template.")
    format: JsonOutputFormat | None = Field(
        default=None, description="What the text must match."
    )


class DiagnosticsRequest(JsonObject):
    """Asks why a prompt was not restored; see ``diagnostics.py``."""

    previous_message_id: str | None = Field(
        None, description="The answer before; `null` only asks for the next one."
    )


class CountTokensBody(JsonObject):
    """The fields that make the prompt: the body of ``/v1/messages/count_tokens``."""

    table: ClassVar[FieldTable] = fields.COUNT

    model: str = Field(description="A served model or an alias of one.")
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Texts = Field([], description="Text, or blocks of text.")
    tools: list[AnthropicTool] = Field([], description="Tools that the client runs.")
    tool_choice: AnthropicToolChoice | None = Field(
        None, description="Whether a tool must be called."
    )
    thinking: ThinkingConfig | None = Field(None, description="Default: as the model does.")
    output_config: OutputConfig = OutputConfig()
    output_format: JsonOutputFormat | None = Field(
        None, description="Older name of `output_config.format`."
    )
    cache_control: Json | None = Field(
        None, description="As if it stood on the last block."
    )

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error(INVALID, "Two of `tools` have the same name.", "tools")
        choice = self.tool_choice
        if choice is None:
            return self
        if choice.type == "any" and not names:
            raise field_error(INVALID, "`tool_choice` needs `tools`.", "tool_choice")
        if choice.type == "tool" and choice.name not in names:
            raise field_error(
                INVALID,
                f"`tool_choice.name` must be one of the `tools`, not {shown(choice.name)}.",
                "tool_choice.name",
            )
        return self


class MessagesBody(CountTokensBody):
    """Body of ``POST /v1/messages``."""

    table: ClassVar[FieldTable] = fields.PROMPT

    max_tokens: int = Field(
        ge=0, description="Longest answer, in tokens; 0 only reads the prompt."
    )
    stop_sequences: Stop = Field([], description="Strings that end the answer.")
    temperature: float = Field(SamplingParams.temperature, ge=0, le=2)
    top_p: float = Field(SamplingParams.top_p, gt=0, le=1)
    top_k: int = Field(SamplingParams.top_k, ge=0, description="0: no limit.")
    stream: bool = False
    diagnostics: DiagnosticsRequest | None = Field(
        None, description="Asks why the prompt is not a continuation of the last one."
    )
