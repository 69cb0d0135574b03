"""The body of ``POST /v1/chat/completions``, and the turn it asks for. Pure; any thread.

A last message of role assistant is history like any other, and a new answer follows it;
with ``continue_final_message`` it is the beginning of the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, PlainValidator, model_validator

from mtplx.server.chat_messages import FunctionType, Message
from mtplx.server.fields import (
    CHAT,
    TOOL,
    TOOL_CHOICE,
    UNSUPPORTED,
    FieldTable,
    field_error,
    shown,
)
from mtplx.server.requests import INVALID, GenerationBody, JsonObject
from mtplx.server.structured import Structured
from mtplx.server.turn import ToolChoice, TurnRequest

MAX_TOP_LOGPROBS = 20
# OpenAI's number. Each costs a rendering of the conversation.
_MAX_BREAKPOINTS = 4

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Templates that read an effort know three.
_TEMPLATE_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}

# Arguments of the renderer itself, and what it decides about the template.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"self", "messages", "conversation", "tools", "documents", "chat_template", "tokenize"}
    | {"add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
    | {"return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"}
    | {"padding", "truncation", "max_length", "edge_after"}
)


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class Function(JsonObject):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema.")
    strict: bool | None = Field(None, description="Arguments must match the schema.")


class Tool(JsonObject):
    """A tool. Only functions are supported."""

    table: ClassVar[FieldTable] = TOOL

    type: FunctionType
    function: Function

    def as_dict(self) -> dict[str, Any]:
        """Return what the chat template reads: always the same keys in one order."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True),
        }


class NamedFunction(JsonObject):
    """The name of a function."""

    name: ToolName


class NamedTool(JsonObject):
    """The one function that must be called."""

    table: ClassVar[FieldTable] = TOOL_CHOICE

    type: Literal["function"]
    function: NamedFunction


ToolWord = Literal["auto", "none", "required"]


def _tool_choice(value: Any) -> Any:
    # By hand, because pydantic's unions put the choice into the path of an error.
    if value in get_args(ToolWord):
        return value
    if not isinstance(value, dict):
        raise field_error(
            INVALID,
            "`tool_choice` must be auto, none, required or an object that names a "
            f"function, not {shown(value)}.",
        )
    if (kind := value.get("type")) not in (None, "function"):
        raise field_error(
            UNSUPPORTED,
            f"`tool_choice` of type {shown(kind)} is not supported; name one function.",
            "type",
        )
    return NamedTool.model_validate(value)


class ChatBody(Structured, GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    table: ClassVar[FieldTable] = CHAT

    messages: list[Message] = Field(min_length=1, description="The conversation.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    max_completion_tokens: int | None = Field(None, ge=1, description="As `max_tokens`.")
    logprobs: bool = Field(False, description="Tell how likely each token was.")
    top_logprobs: int = Field(
        0, ge=0, le=MAX_TOP_LOGPROBS, description="And this many others in its place."
    )
    tools: list[Tool] = Field([], description="Functions that the model may call.")
    tool_choice: Annotated[
        ToolWord | NamedTool,
        PlainValidator(_tool_choice, json_schema_input_type=ToolWord | NamedTool),
    ] = Field("auto", description="Whether a function must be called, and which.")
    parallel_tool_calls: bool = Field(True, description="More than one call may be made.")
    reasoning_effort: Effort | None = Field(
        None, description="For the chat template; `none` switches thinking off."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables for the chat template."
    )
    continue_final_message: bool = Field(
        False, description="The last message is the beginning of the answer."
    )
    add_generation_prompt: bool | None = Field(
        None, description="False only beside `continue_final_message`."
    )

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_error(
                INVALID,
                "`max_tokens` and `max_completion_tokens` differ; send one of them.",
                "max_completion_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise field_error(
                INVALID, "`top_logprobs` needs `logprobs: true`.", "top_logprobs"
            )
        if taken := sorted(
            _RESERVED_TEMPLATE_KWARGS.intersection(self.chat_template_kwargs)
        ):
            raise field_error(
                INVALID,
                f"`chat_template_kwargs` cannot set {', '.join(taken)}.",
                "chat_template_kwargs",
            )
        self._check_tools()
        self._check_continuation()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error(INVALID, "Two of `tools` have the same name.", "tools")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise field_error(
                INVALID,
                f"`tool_choice` names {shown(choice.function.name)}, "
                "which is not among `tools`.",
                "tool_choice",
            )
        if choice == "required" and not names:
            raise field_error(
                INVALID,
                "`tool_choice` is required, and there are no `tools`.",
                "tool_choice",
            )

    def _check_continuation(self) -> None:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            raise field_error(
                INVALID,
                "`continue_final_message` needs a last message of role assistant "
                "without `tool_calls`.",
                "continue_final_message",
            )
        if self.add_generation_prompt not in (None, not self.continue_final_message):
            raise field_error(
                INVALID,
                "`add_generation_prompt` is the opposite of `continue_final_message`; "
                "leave it out.",
                "add_generation_prompt",
            )

    def turn(self, namespace: str) -> TurnRequest:
        """Return what is asked for.

        Args:
            namespace: As ``Service.namespace`` says.

        Raises:
            InvalidRequestError: The structure asked for cannot be had.
        """
        return TurnRequest(
            messages=[message.as_dict() for message in self.messages],
            tools=[tool.as_dict() for tool in self.tools],
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            grammar=self.grammar(),
            template_kwargs=template_kwargs(self.reasoning_effort)
            | self.chat_template_kwargs,
            continue_final_message=self.continue_final_message,
            edge_after=tuple(
                index for index, each in enumerate(self.messages) if each.is_breakpoint
            )[-_MAX_BREAKPOINTS:],
            sampling=self.sampling(),
            stop=tuple(self.stop),
            max_new_tokens=self.max_completion_tokens or self.max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            namespace=namespace,
            deadline_after_s=self.deadline_s,
        )

    def _choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("required", self.tool_choice.function.name)
        return ToolChoice(self.tool_choice)


def template_kwargs(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates learn of a reasoning effort: some
    read a word, some a switch under one of two names."""
    if effort is None:
        return {}
    thinking = effort != "none"
    switches: dict[str, Any] = {"enable_thinking": thinking, "thinking": thinking}
    if thinking:
        switches["reasoning_effort"] = _TEMPLATE_EFFORTS.get(effort, effort)
    return switches
