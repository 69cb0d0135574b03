"""Grammars that answers are held to.

Decides what a client may ask an answer to match, and puts the grammar of a whole answer
together: reasoning, where the model reasons, then what was asked for. JSON Schemas are
``schema``'s, tool calls ``call_grammar``'s; llguidance follows a grammar, on the engine's
threads. A grammar is the text that llguidance reads. Pure; any thread, but slow: not the
event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from mtplx.errors import InvalidRequestError
from mtplx.text.call_grammar import forced_calls, strict_calls
from mtplx.text.channels import AnswerFormat
from mtplx.text.lark import FREE_TEXT, check, lark_text, literal, until
from mtplx.text.schema import prepare_schema
from mtplx.text.tool_calls import Tool


def json_object_grammar() -> str:
    """Return the grammar of any JSON object."""
    return json_schema_grammar({"type": "object"}, param="response_format")


def json_schema_grammar(
    schema: Any, *, strict: bool = True, param: str = "response_format"
) -> str:
    """Return the grammar of JSON that matches a schema.

    Args:
        schema: As the client sent it.
        strict: Refuse a ``oneOf`` whose branches may overlap; otherwise it is read as
            ``anyOf``. Any other keyword that cannot be enforced is refused anyway.
        param: Where it was sent, for errors.

    Raises:
        InvalidRequestError: It is no schema, nothing can match it, or it uses a keyword
            that cannot be enforced; the message names keyword and place.
    """
    prepared = prepare_schema(schema, strict=strict, param=param)
    return LLMatcher.grammar_from_json_schema(json.dumps(prepared))


def regex_grammar(pattern: str, *, param: str = "regex") -> str:
    """Return the grammar of text that a regular expression matches as a whole.

    Raises:
        InvalidRequestError: The pattern is none, or uses what cannot be enforced
            (look-around, back-references).
    """
    return _checked(LLMatcher.grammar_from_regex(pattern), "regular expression", param)


def lark_grammar(text: str, *, param: str = "grammar") -> str:
    """Return the grammar written in llguidance's Lark.

    Raises:
        InvalidRequestError: It cannot be read, or names special tokens.
    """
    return _checked(lark_text(text), "grammar", param)


def answer_grammar(
    answer_format: AnswerFormat,
    *,
    grammar: str | None = None,
    tools: Sequence[Tool] = (),
    required: bool = False,
    name: str | None = None,
    parallel: bool = True,
    reasoning: bool = False,
) -> str | None:
    """Return the grammar of a whole answer; None where it is free.

    Args:
        answer_format: The model's. Where it reasons, it may do so first.
        grammar: What the answer's text must match, as made here. Where tools may be
            called, the answer is either that or calls.
        tools: What may be called. Calls of ``strict`` tools are right wherever they
            stand.
        required: The answer is calls.
        name: With ``required``: of this tool.
        parallel: More than one call may be made.
        reasoning: The answer begins inside reasoning.

    Raises:
        InvalidRequestError: No tool has the name, or a strict tool's parameters cannot
            be enforced.
        UnsupportedFieldError: Calls must be right, and cannot be enforced in the format
            of this model.
    """
    if required:
        choices = [forced_calls(tools, answer_format, name=name, parallel=parallel)]
    elif grammar is not None:
        choices = [grammar]
        if tools:
            choices.append(forced_calls(tools, answer_format, parallel=parallel))
    else:
        calls = strict_calls(tools, answer_format, parallel=parallel)
        if calls is None:
            return None
        choices = [calls]
    parts = [
        {**json.loads(choice)["grammars"][0], "name": f"choice_{index}"}
        for index, choice in enumerate(choices)
    ]
    names = " | ".join(f"@{part['name']}" for part in parts)
    start = [f"start: ({names})", FREE_TEXT]
    if answer_format.think is not None:
        opening, end = answer_format.think
        thought = "thought SPACE?"
        if not reasoning:
            thought = f"({literal(opening, answer_format.tokens)} {thought})?"
        start[0] = f"start: {thought} ({names})"
        start += ["SPACE: /[ \\n]{1,4}/", *until("thought", end, answer_format.tokens)]
    whole = {"name": "answer", "lark_grammar": "\n".join(start)}
    return json.dumps({"grammars": [whole, *parts]})


def grammar_vocabulary(
    tokenizer_json: str, rows: int, end_ids: Sequence[int]
) -> LLTokenizer:
    """Return the tokens that grammars choose from.

    Takes a second for 50,000 tokens, and no other thread runs Python meanwhile.

    Args:
        tokenizer_json: Of the library ``tokenizers``.
        rows: Of the model's output layer; those without a token never match.
        end_ids: Tokens that end an answer.
    """
    return LLTokenizer(tokenizer_json, n_vocab=rows, eos_token=list(end_ids))


def _checked(grammar: str, what: str, param: str) -> str:
    error, warnings = check(grammar)
    # Which special tokens there are only the model's vocabulary tells, and what they
    # mean only its template.
    error = error or next((text for text in warnings if "special_token" in text), "")
    if error:
        reason = re.search(r"\berror: (.*)", error)
        text = reason[1] if reason else error.partition("\n")[0]
        raise InvalidRequestError(
            f"The {what} cannot be used: {text}. Correct it.", param=param
        )
    return grammar
