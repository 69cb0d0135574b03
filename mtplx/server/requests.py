"""What the request bodies of all routes are made of.

Strict: a bool is not an integer, ``"0.7"`` is not a number. Fields that are not declared
go through the tables of ``fields.py``. ``chat_body.py`` and ``completion_body.py`` hold
what each of OpenAI's generating routes adds; what depends on the model (its name,
vocabulary and context) is checked in ``service.py``. Pure; any thread.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.config import JsonValue
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from mtplx.server.fields import (
    BODY,
    STREAM_OPTIONS,
    FieldTable,
    admit,
    field_error,
    shown,
)
from mtplx.types import SamplingParams

INVALID = "invalid_value"
MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
_INT64 = 2**63
_NULL = {"type": "null"}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class JsonObject(BaseModel):
    """A JSON object whose undeclared fields are judged by a table."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    table: ClassVar[FieldTable] = FieldTable()

    @model_validator(mode="before")
    @classmethod
    def _admit(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return admit(body, wire_names(cls), cls.table)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Tell what ``admit`` does: a field that may be absent may be null, the table's
        fields are there, and there are no others."""
        schema = handler(core_schema)
        whole = handler.resolve_ref_schema(schema)
        fields = whole.setdefault("properties", {})
        for name in fields.keys() - whole.get("required", ()):
            fields[name] = _or_null(fields[name])
        for name, reason in cls.table.ignored.items():
            fields[name] = {"description": f"Ignored: {reason}."}
        for name, accepted in cls.table.refused.items():
            fields[name] = {"description": "Not supported.", "enum": [*accepted, None]}
        whole["additionalProperties"] = False
        return schema


def _or_null(field: JsonSchemaValue) -> JsonSchemaValue:
    told = {key: field[key] for key in ("title", "description", "default") if key in field}
    value = {key: field[key] for key in field.keys() - told.keys()}
    kinds = value.get("anyOf", [value])
    return told | {"anyOf": [*(kind for kind in kinds if kind != _NULL), _NULL]}


def wire_names(model: type[JsonObject]) -> list[str]:
    """Return the fields that ``model`` declares, as they are called in JSON."""
    return [each.alias or name for name, each in model.model_fields.items()]


class StreamOptions(JsonObject):
    """Options of a stream."""

    table: ClassVar[FieldTable] = STREAM_OPTIONS

    include_usage: bool = Field(
        default=False, description="End with a chunk that carries `usage`."
    )


def _stop(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _token_ids(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise field_error(
                INVALID, f"The keys of `logit_bias` must be token ids, not {shown(key)}."
            )
    return bias


_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopStrings = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)]
Stop = Annotated[
    _StopStrings,
    BeforeValidator(_stop, json_schema_input_type=_StopString | _StopStrings),
]
LogitBias = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_token_ids)
]


# What ``GenerationBody._check_stream_options`` holds, as a JSON schema.
_STREAMED_OR_NOT: list[JsonValue] = [
    {"properties": {"stream": {"const": True}}, "required": ["stream"]},
    {
        "properties": {
            "stream_options": {"type": "null"},
            "return_progress": {"enum": [False, None]},
        }
    },
]


class GenerationBody(JsonObject):
    """The fields that both of OpenAI's older generating routes have."""

    model_config = ConfigDict(json_schema_extra={"anyOf": _STREAMED_OR_NOT})
    table: ClassVar[FieldTable] = BODY

    model: str | None = Field(
        None, description="A served model or an alias of one; default: the first."
    )
    n: int = Field(1, ge=1, le=MAX_CHOICES, description="Answers to each prompt.")
    temperature: float = Field(
        SamplingParams.temperature, ge=0, le=2, description="0: the most likely token."
    )
    top_p: float = Field(
        SamplingParams.top_p,
        gt=0,
        le=1,
        description="Draw from the fewest tokens that reach this probability.",
    )
    top_k: int = Field(SamplingParams.top_k, ge=-1, description="0 or -1: no limit.")
    min_p: float = Field(
        SamplingParams.min_p,
        ge=0,
        le=1,
        description="Drop tokens below this share of the most likely one.",
    )
    seed: int | None = Field(
        None, ge=-_INT64, lt=_INT64, description="Repeats the draw; answer i adds i."
    )
    repetition_penalty: float = Field(
        SamplingParams.repetition_penalty,
        gt=0,
        description="Above 1: less of what the prompt and the answer have already.",
    )
    presence_penalty: float = Field(
        SamplingParams.presence_penalty,
        ge=-2,
        le=2,
        description="Taken once from tokens of the answer.",
    )
    frequency_penalty: float = Field(
        SamplingParams.frequency_penalty,
        ge=-2,
        le=2,
        description="Taken for each time that the answer has the token.",
    )
    logit_bias: LogitBias = Field({}, description="Token id -> added to its logit.")
    stop: Stop = Field([], description="Strings that end the answer.")
    deadline_s: float | None = Field(
        None, gt=0, description="Give up this many seconds after the request arrived."
    )
    prompt_cache_key: str | None = Field(
        None, description="Whose KV state to share, where `cache_isolation` asks for it."
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    stream_options: StreamOptions = Field(
        StreamOptions(), description="Only when `stream` is true."
    )
    return_progress: bool = Field(
        False, description="Send chunks with `prompt_progress` while the prompt is read."
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        for name in ("stream_options", "return_progress"):
            if not self.stream and name in self.model_fields_set and getattr(self, name):
                raise field_error(
                    INVALID, f"`{name}` is only allowed when `stream` is true.", name
                )
        return self

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
            logit_bias=tuple((int(key), bias) for key, bias in self.logit_bias.items()),
        )
