"""Structured output: what an answer must match, as OpenAI and as vLLM spell it.

``response_format`` is OpenAI's. ``structured_outputs`` is what vLLM's clients send for
what it cannot say: a regular expression, a grammar, a choice of texts. Both become one
grammar of ``mtplx.text.grammar``. Pure; any thread.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mtplx.server.fields import STRUCTURED_OUTPUTS, FieldTable, field_error
from mtplx.server.requests import INVALID, JsonObject
from mtplx.text.grammar import (
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)


class JsonSchemaFormat(JsonObject):
    """A named JSON schema."""

    name: str = Field(description="For its reader; the model does not see it.")
    description: str | None = Field(None, description="As `name`.")
    schema_: dict[str, Any] = Field({}, alias="schema", description="JSON schema.")
    strict: bool = Field(
        False, description="Refuse what can be enforced only in a weaker sense."
    )


class ResponseFormat(JsonObject):
    """What the answer's text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = Field(
        default=None, description="With type json_schema, and no other."
    )

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise field_error(
                INVALID,
                "`json_schema` is required with type json_schema, and with no other.",
                "json_schema",
            )
        return self


class StructuredOutputs(JsonObject):
    """What the answer's text must be, in one of these ways."""

    table: ClassVar[FieldTable] = STRUCTURED_OUTPUTS

    json_: dict[str, Any] | None = Field(None, alias="json", description="JSON schema.")
    json_object: bool | None = Field(None, description="True: any JSON object.")
    regex: str | None = Field(None, description="Regular expression for all of it.")
    choice: list[str] | None = Field(None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(None, description="Context-free grammar in Lark's form.")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = [value for value in self.__dict__.values() if value not in (None, False)]
        if len(given) != 1:
            raise field_error(
                INVALID,
                "`structured_outputs` needs exactly one of json, json_object, regex, "
                f"choice and grammar, not {len(given)}.",
            )
        return self

    def as_grammar(self) -> str:
        """Return the grammar. Raises as ``Structured.grammar``."""
        path = "structured_outputs."
        if self.json_ is not None:
            return json_schema_grammar(self.json_, strict=False, param=f"{path}json")
        if self.regex is not None:
            return regex_grammar(self.regex, param=f"{path}regex")
        if self.choice is not None:
            texts = "|".join(re.escape(text) for text in self.choice)
            return regex_grammar(texts, param=f"{path}choice")
        if self.grammar is not None:
            return lark_grammar(self.grammar, param=f"{path}grammar")
        return json_object_grammar()


class Structured(JsonObject):
    """The two fields that ask for structured output."""

    response_format: ResponseFormat = Field(
        ResponseFormat(type="text"), description="What the text of the answer must match."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="As `response_format`, with what only vLLM has."
    )

    @model_validator(mode="after")
    def _check_structure(self) -> Self:
        if self.structured_outputs is not None and self.response_format.type != "text":
            raise field_error(
                INVALID,
                "Send `response_format` or `structured_outputs`, not both.",
                "structured_outputs",
            )
        return self

    def grammar(self) -> str | None:
        """Return the grammar of the answer; None leaves it free. Slow for a large schema.

        Raises:
            InvalidRequestError: The schema, the expression or the grammar cannot be used.
        """
        wanted = self.structured_outputs
        if wanted is not None:
            return wanted.as_grammar()
        if (named := self.response_format.json_schema) is not None:
            param = "response_format.json_schema.schema"
            return json_schema_grammar(named.schema_, strict=named.strict, param=param)
        return json_object_grammar() if self.response_format.type == "json_object" else None
