"""The body of ``POST /v1/responses``.

Strict, like the bodies of ``requests.py``; the fields that are not declared go through
the tables here. What depends on the model or on the store is checked in ``read.py``.
Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from mtplx.server.chat_body import MAX_TOP_LOGPROBS, Effort, Function, ToolName
from mtplx.server.fields import FieldTable, field_error, shown
from mtplx.server.requests import INVALID, JsonObject
from mtplx.server.responses_api.items import AnyItem, InputItem
from mtplx.server.responses_api.objects import variants
from mtplx.server.structured import JsonSchemaFormat
from mtplx.server.turn import ToolChoice
from mtplx.types import SamplingParams

BODY = FieldTable(
    ignored={
        "max_tool_calls": "limits built-in tools, and there are none",
        "prompt_cache_retention": "a hint; the SessionBank has its own budget",
        "safety_identifier": "names the end user for the provider's own statistics",
        "service_tier": "there is one tier",
    },
    refused={
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "generate": (True,),
        "image": (),
        "moderation": (),
        "prompt": (),
        "stream_options": ({}, {"include_obfuscation": False}),
        "truncation": ("disabled",),
    },
)

# The rest of what `include` may name adds nothing here: reasoning is sent in the clear,
# and the other entries belong to built-in tools and images.
LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class FunctionTool(Function):
    """A function the model may call. What chats nest in ``function`` is flat here."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={"output_schema": "what a function gives back is the client's business"},
        refused={
            "allowed_callers": (["direct"],),
            "async": (False,),
            "defer_loading": (False,),
        },
    )

    type: Literal["function"]

    def as_chat(self) -> dict[str, Any]:
        """Return what the chat template reads: the same as for a chat."""
        function = self.model_dump(include=set(Function.model_fields), exclude_none=True)
        return {"type": "function", "function": function}


class FunctionChoice(JsonObject):
    """Names the function that must be called."""

    type: Literal["function"]
    name: ToolName


_pick_choice = variants("tool choice", {"function": FunctionChoice})


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, dict):
        return _pick_choice(value)
    raise field_error(
        INVALID,
        "`tool_choice` must be none, auto, required or an object that names a function, "
        f"not {shown(value)}.",
    )


class ReasoningOptions(JsonObject):
    """How much to think."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={
            "summary": "reasoning is sent whole",
            "generate_summary": "as `summary`",
        },
        refused={"context": ("auto",), "mode": ("standard",)},
    )

    effort: Effort | None = Field(
        default=None, description="For the chat template; `none` switches thinking off."
    )


class PlainText(JsonObject):
    """Free text."""

    type: Literal["text"] = "text"


class AnyJson(JsonObject):
    """A JSON object of any kind."""

    type: Literal["json_object"]


class JsonSchema(JsonSchemaFormat):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema.")


TextFormat = PlainText | AnyJson | JsonSchema


class TextOptions(JsonObject):
    """The form of the answer's text."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={"verbosity": "a hint on style for models that were trained on it"}
    )

    format: Annotated[
        TextFormat,
        PlainValidator(
            variants(
                "text format",
                {"text": PlainText, "json_object": AnyJson, "json_schema": JsonSchema},
            ),
            json_schema_input_type=TextFormat,
        ),
    ] = Field(default_factory=PlainText)


class PromptCacheOptions(JsonObject):
    """What to do with the prompt's state."""

    table: ClassVar[FieldTable] = FieldTable(
        ignored={
            "mode": "every prefix is kept anyway",
            "ttl": "a hint; the SessionBank has its own budget",
        }
    )

    prewarm: bool = Field(
        default=False, description="Read the prompt and generate nothing."
    )
    comparison_response_id: str | None = Field(
        default=None,
        description="Say in `prompt_cache_diagnostics` what was not reused, and why.",
    )


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise field_error(
        INVALID, f"`input` must be a string or a list of items, not {shown(value)}."
    )


class ResponseBody(JsonObject):
    """Body of ``POST /v1/responses``."""

    table: ClassVar[FieldTable] = BODY

    model: str | None = Field(
        None, description="A served model or an alias of one; default: the first."
    )
    input: Annotated[
        list[InputItem],
        Field(min_length=1),
        BeforeValidator(
            _input,
            json_schema_input_type=str | Annotated[list[AnyItem], Field(min_length=1)],
        ),
    ] = Field(description="A text of the user, or items: messages, calls, their outputs.")
    instructions: str | None = Field(None, description="System message of this turn only.")
    previous_response_id: str | None = Field(
        None, description="Go on from this stored response."
    )
    store: bool = Field(True, description="Keep the response, to retrieve or continue it.")
    stream: bool = Field(False, description="Answer with server-sent events.")
    max_output_tokens: int | None = Field(
        None, ge=1, description="Longest answer, reasoning included, in tokens."
    )
    temperature: float = Field(SamplingParams.temperature, ge=0, le=2)
    top_p: float = Field(SamplingParams.top_p, gt=0, le=1)
    tools: list[
        Annotated[
            FunctionTool,
            PlainValidator(
                variants("tool", {"function": FunctionTool}),
                json_schema_input_type=FunctionTool,
            ),
        ]
    ] = Field([], description="Functions the model may call.")
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice,
        PlainValidator(
            _tool_choice,
            json_schema_input_type=Literal["none", "auto", "required"] | FunctionChoice,
        ),
    ] = Field("auto", description="Whether a function must be called, or which one.")
    parallel_tool_calls: bool = Field(True, description="More than one call may be made.")
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = Field(default_factory=TextOptions)
    include: list[Includable] = Field(
        [], description="Asks for logprobs; the rest is there."
    )
    top_logprobs: int = Field(
        0,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Tell for each token how likely it and this many others were.",
    )
    prompt_cache_key: str | None = Field(
        None, description="Whose KV state to share, where `cache_isolation` asks for it."
    )
    prompt_cache_options: PromptCacheOptions = PromptCacheOptions()
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
        Field(max_length=16),
    ] = Field({}, description="Labels, kept with the response.")
    user: str | None = Field(None, description="Repeated in the response.")

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise field_error(INVALID, "Two tools have the same name.", "tools")
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice) and choice.name not in names:
            raise field_error(
                INVALID,
                f"`tool_choice` names {shown(choice.name)}, which is not in `tools`.",
                "tool_choice",
            )
        if choice == "required" and not names:
            raise field_error(
                INVALID,
                "`tool_choice` is required, and there are no `tools`.",
                "tool_choice",
            )
        return self

    def choice(self) -> ToolChoice:
        """Return which tools may, or must, be called."""
        if isinstance(self.tool_choice, FunctionChoice):
            return ToolChoice("required", self.tool_choice.name)
        return ToolChoice(self.tool_choice)

    def logprobs(self) -> int | None:
        """Return how many likely tokens are told for each token; None tells nothing."""
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None
