"""The request bodies of the generating routes, and their meaning.

Strict: a bool is not an integer, ``"0.7"`` is not a number. Fields that are not
declared here go through the tables of ``fields.py``. What depends on the model (its
name, vocabulary and context) is checked in ``service.py``. Pure; any thread.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from mtplx.server.fields import (
    BODY,
    CONTENT_PART,
    MESSAGE,
    STREAM_OPTIONS,
    UNSUPPORTED,
    FieldTable,
    admit,
    field_error,
    shown,
)
from mtplx.types import SamplingParams

INVALID = "invalid_value"
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
_INT64 = 2**63
# Arguments of the renderer itself, and what it decides about the template.
_RESERVED_TEMPLATE_KWARGS = frozenset(
    {"self", "messages", "conversation", "tools", "documents", "chat_template", "tokenize"}
    | {"add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"}
    | {"return_assistant_tokens_mask", "sanitize_control_tokens", "tokenizer_kwargs"}
    | {"padding", "truncation", "max_length"}
)


class _Object(BaseModel):
    """A JSON object whose undeclared fields are judged by a table."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    table: ClassVar[FieldTable] = FieldTable()

    @model_validator(mode="before")
    @classmethod
    def _admit(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return admit(body, cls.model_fields, cls.table)


def _part_type(value: str) -> str:
    if value != "text":
        raise field_error(
            UNSUPPORTED,
            f"Content parts of type {shown(value)} are not supported; send text.",
        )
    return value


class TextPart(_Object):
    """One part of a message's content."""

    table: ClassVar[FieldTable] = CONTENT_PART

    type: Annotated[str, AfterValidator(_part_type)]
    text: str


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if isinstance(value, list):
        return value
    raise field_error(
        INVALID, f"`content` must be a string or a list of text parts, not {shown(value)}."
    )


def _role(value: str) -> str:
    if value == "developer":
        return "system"
    if value in ("tool", "function"):
        raise field_error(
            UNSUPPORTED, f"Messages of role {shown(value)} are not supported."
        )
    if value not in ("system", "user", "assistant"):
        raise field_error(
            INVALID,
            f"Unknown role {shown(value)}; use system, developer, user or assistant.",
        )
    return value


class Message(_Object):
    """One message of a chat. ``developer`` means ``system``; text parts are joined."""

    table: ClassVar[FieldTable] = MESSAGE

    role: Annotated[str, AfterValidator(_role)]
    content: Annotated[
        list[TextPart], BeforeValidator(_parts, json_schema_input_type=str | list[TextPart])
    ]
    name: str | None = None
    reasoning_content: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return what the chat template reads."""
        message = {
            "role": self.role,
            "content": "".join(part.text for part in self.content),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        return message


class StreamOptions(_Object):
    """Options of a stream."""

    table: ClassVar[FieldTable] = STREAM_OPTIONS

    include_usage: bool = Field(
        default=False, description="End with a chunk that carries `usage`."
    )


def _stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GenerationBody(_Object):
    """The fields that every generating route has."""

    table: ClassVar[FieldTable] = BODY

    model: str | None = Field(None, description="Name of the served model.")
    temperature: float = Field(SamplingParams.temperature, ge=0, le=2)
    top_p: float = Field(SamplingParams.top_p, gt=0, le=1)
    top_k: int = Field(SamplingParams.top_k, ge=-1, description="0 or -1: no limit.")
    min_p: float = Field(SamplingParams.min_p, ge=0, le=1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    repetition_penalty: float = Field(SamplingParams.repetition_penalty, gt=0)
    presence_penalty: float = Field(SamplingParams.presence_penalty, ge=-2, le=2)
    frequency_penalty: float = Field(SamplingParams.frequency_penalty, ge=-2, le=2)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        Field(max_length=MAX_STOP_STRINGS),
        BeforeValidator(_stop, json_schema_input_type=str | list[str]),
    ] = Field([], description="Strings that end the answer.")
    max_tokens: int | None = Field(None, ge=1, description="Longest answer, in tokens.")
    deadline_s: float | None = Field(
        None, gt=0, description="Give up this many seconds after the request arrived."
    )
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise field_error(
                INVALID,
                "`stream_options` is only allowed when `stream` is true.",
                "stream_options",
            )
        return self

    def answer_tokens(self) -> int | None:
        """Return the longest answer asked for, or None."""
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        """Return how tokens are to be chosen."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            seed=self.seed,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )


class ChatBody(GenerationBody):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="As `max_tokens`.")
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Variables for the chat template."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_error(
                INVALID,
                "`max_tokens` and `max_completion_tokens` differ; send one of them.",
                "max_completion_tokens",
            )
        if taken := sorted(
            _RESERVED_TEMPLATE_KWARGS.intersection(self.chat_template_kwargs)
        ):
            raise field_error(
                INVALID,
                f"`chat_template_kwargs` cannot set {', '.join(taken)}.",
                "chat_template_kwargs",
            )
        return self

    def answer_tokens(self) -> int | None:
        """Return the longest answer asked for, or None."""
        return self.max_completion_tokens or self.max_tokens


def _one_prompt(value: Any) -> Any:
    """Return the one prompt in ``value``: text, or a list of token ids."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise field_error(
                UNSUPPORTED,
                "Several prompts in one request are not supported; send them apart.",
            )
        value = value[0]
    if isinstance(value, str | list):
        if not value:
            raise field_error(INVALID, "`prompt` must not be empty.")
        return value
    raise field_error(
        INVALID, f"`prompt` must be a string or a list of token ids, not {shown(value)}."
    )


class CompletionBody(GenerationBody):
    """Body of ``POST /v1/completions``. ``prompt`` is text or token ids; a list of
    one text or of one list of token ids is unwrapped."""

    prompt: Annotated[
        Any,
        BeforeValidator(
            _one_prompt,
            json_schema_input_type=str | list[str] | list[int] | list[list[int]],
        ),
    ]
