"""The body of ``POST /v1/completions``. Pure; any thread."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BeforeValidator, Field, model_validator

from mtplx.server.fields import COMPLETION, FieldTable, field_error, shown
from mtplx.server.requests import INVALID, MAX_CHOICES, GenerationBody
from mtplx.server.structured import Structured

MAX_LOGPROBS = 20

_Each = TypeVar("_Each")
_Some = Annotated[list[_Each], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = _Some[Annotated[int, Field(ge=0)]]


def _prompts(value: Any) -> Any:
    """Return a list of prompts, each a text or a list of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise field_error(
            INVALID,
            f"`prompt` must be a string or a list of token ids, not {shown(value)}.",
        )
    if value and not isinstance(value[0], str | list):
        value = [value]
    for index, prompt in enumerate(value):
        if not isinstance(prompt, type(value[0])):
            raise field_error(
                INVALID,
                f"`prompt[{index}]` is of another kind than the first: send all prompts "
                "as strings, or all as lists of token ids.",
            )
    if not value or not all(value):
        raise field_error(INVALID, "`prompt` must not be empty.")
    return value


class CompletionBody(Structured, GenerationBody):
    """Body of ``POST /v1/completions``. ``prompt`` is one prompt or a list of them, each
    text or token ids."""

    table: ClassVar[FieldTable] = COMPLETION

    prompt: Annotated[
        list[str | list[Any]],
        BeforeValidator(
            _prompts,
            json_schema_input_type=_Text | _TokenIds | _Some[_Text] | _Some[_TokenIds],
        ),
    ] = Field(description="A text or token ids, or a list of either.")
    max_tokens: int | None = Field(
        None, ge=0, description="Longest answer, in tokens; 0 reads the prompt alone."
    )
    echo: bool = Field(False, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Tell this many likely tokens each."
    )
    best_of: int | None = Field(
        None, ge=1, le=MAX_CHOICES, description="Only what `n` is: all are returned."
    )

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of not in (None, self.n):
            raise field_error(
                INVALID, "`best_of` must be equal to `n`; leave it out.", "best_of"
            )
        return self
