"""What a grammar lets through is what was asked for, and what cannot be asked is told."""

from __future__ import annotations

import importlib
import json
import random
from itertools import groupby

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from mtplx.errors import InvalidRequestError, UnsupportedFieldError
from mtplx.text.channels import AnswerFormat, ChannelParser, Reasoning, Text
from mtplx.text.grammar import (
    answer_grammar,
    grammar_vocabulary,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from mtplx.text.tool_calls import PLAIN_JSON, CallArguments, CallFormat, CallStart

from .tokenizers_factory import make_tokenizer, make_wrapper

PLAIN = AnswerFormat(think=None, calls=PLAIN_JSON)
THINKS = AnswerFormat(think=("<think>", "</think>"), calls=PLAIN_JSON)


def vocabulary(*more: str) -> LLTokenizer:
    wrapper = make_wrapper("byte_level")
    wrapper._tokenizer.add_tokens(list(more))
    return grammar_vocabulary(
        wrapper.backend_tokenizer.to_str(), len(wrapper) + 7, sorted(wrapper.eos_token_ids)
    )


VOCABULARY = vocabulary()


def accepts(grammar: str, text: str, tokens: LLTokenizer = VOCABULARY) -> bool:
    matcher = LLMatcher(tokens, grammar, log_level=0)
    token_ids = tokens.tokenize_str(text, parse_special=True)
    read = matcher.try_consume_tokens(token_ids)
    assert read < len(token_ids) or not matcher.is_error(), matcher.get_error()
    return read == len(token_ids) and matcher.is_accepting()


def walk(
    grammar: str, seed: int, tokens: LLTokenizer = VOCABULARY, begin: str = ""
) -> str | None:
    """A random answer that the grammar lets through; None where it has not ended soon.
    Half of the time it takes what ends strings and objects, if it may."""
    rng = random.Random(seed)
    matcher = LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    taken = tokens.tokenize_str(begin, parse_special=True)
    assert matcher.consume_tokens(taken)
    while not matcher.is_stopped():
        if len(taken) > 400:
            return None
        if matcher.is_accepting() and rng.random() < 0.3:
            break
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        allowed = [token_id for token_id in allowed if token_id not in tokens.eos_tokens]
        if not allowed:
            break
        ends = [token_id for token_id in allowed if tokens.decode_str([token_id]) in ENDS]
        choice = rng.choice(ends if ends and rng.random() < 0.5 else allowed)
        assert matcher.consume_token(choice), matcher.get_error()
        taken.append(choice)
    assert matcher.is_accepting()
    return tokens.decode_str(taken)


ENDS = {'"', "}", "]", "<", "</think>", "</tool_call>", "\n", "/"}


# -- JSON ---------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/home"},
    },
    "required": ["name", "age"],
    "$defs": {
        "home": {
            "type": "object",
            "properties": {"no": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "required": ["no"],
        }
    },
}


def is_person(value: dict) -> bool:
    return (
        isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and value["age"] in range(131)
        and set(value) <= {"name", "age", "tags", "home"}
        and set(value.get("tags", ())) <= {"a", "b"}
        and set(value.get("home", {"no": 1})) == {"no"}
    )


SCHEMAS = {
    "person": (PERSON, is_person),
    "array": (
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        lambda value: 1 <= len(value) <= 3 and all(type(v) is bool for v in value),
    ),
    "pattern": (
        {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[ab]{2}$"}},
         "required": ["id"]},
        lambda value: len(value["id"]) == 2 and set(value["id"]) <= set("ab"),
    ),
    "union": (
        {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"const": "no"}]},
        lambda value: value == "no" or value > 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_answer_matches_its_schema_and_little_of_it_is_whitespace(name):
    schema, matches = SCHEMAS[name]
    grammar = json_schema_grammar(schema)
    ended = 0
    for seed in range(25):
        answer = walk(grammar, seed)
        if answer is not None:
            ended += 1
            assert matches(json.loads(answer)), answer
            assert "\n" not in answer
            assert (
                len(answer) <= len(json.dumps(json.loads(answer), ensure_ascii=False)) + 20
            )
    assert ended > 15


def test_a_json_object_is_any_object_and_nothing_else():
    grammar = json_object_grammar()
    assert accepts(grammar, '{"a": [1, {"b": null}], "c":"d"}')
    assert not accepts(grammar, "[1]")
    assert not accepts(grammar, '{"a":  1}')
    assert all(
        isinstance(json.loads(a), dict) for s in range(20) if (a := walk(grammar, s))
    )


@pytest.mark.parametrize(
    ("schema", "more"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, False),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
            True,
        ),
        ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, True),
        (
            {
                "allOf": [
                    {"type": "object", "properties": {"a": {"type": "integer"}}},
                    {"type": "object", "properties": {"b": {"type": "integer"}}},
                ]
            },
            True,
        ),
    ],
)
def test_objects_get_other_properties_only_where_the_schema_speaks_of_them(schema, more):
    assert accepts(json_schema_grammar(schema), '{"a": 1, "b": 2}') is more


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (False, "Nothing can match"),
        (7, "must be an object or boolean"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"enum": ["a"], "type": "integer"}, "#.*enum, type"),
        (
            {"properties": {"a": {"type": "array", "uniqueItems": True}}},
            "uniqueItems at #/properties/a ",
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/x"}},
                "$defs": {"x": {"anyOf": [{"type": "string"}, {"not": {}}]}},
            },
            "not at #/[$]defs/x/anyOf/1",
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 1}},
                "required": ["a"],
            },
            "#/properties/a .*minLength",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern.*look-around"),
        ({"type": "string", "format": "colour"}, "format"),
        ({"type": "text"}, "type: text"),
        ({"$ref": "#/$defs/none"}, "[$]ref"),
        ({"const": float("nan")}, "cannot be used"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_held_to_is_refused_with_keyword_and_place(schema, words):
    with pytest.raises(InvalidRequestError, match=words) as raised:
        json_schema_grammar(schema, param="response_format")
    assert raised.value.param == "response_format"


@pytest.mark.parametrize("more", [{}, {"pattern": "^[12]"}, {"allOf": [{"minLength": 4}]}])
@pytest.mark.parametrize(("kind", "rest"), [("date", ""), ("date-time", "T12:00:00Z")])
def test_a_date_is_a_day_that_the_calendar_has(kind, rest, more):
    grammar = json_schema_grammar({"type": "string", "format": kind, **more})
    for real in ("2024-02-29", "2000-02-29", "2023-02-28", "1999-12-31", "1010-10-10"):
        assert accepts(grammar, f'"{real}{rest}"'), real
    for unreal in ("2023-02-29", "1900-02-29", "2024-02-30", "2023-04-31", "0000-01-01"):
        assert not accepts(grammar, f'"{unreal}{rest}"'), unreal


def test_an_integer_without_bounds_ends() -> None:
    grammar = json_schema_grammar({"type": "array", "items": {"type": "integer"}})
    assert accepts(grammar, f"[{2**53 - 1}, -7]")
    assert not accepts(grammar, f"[{2**53}]")
    own = json_schema_grammar({"type": "integer", "minimum": 0})
    assert accepts(own, "9" * 30)


def test_branches_that_may_overlap_are_taken_where_nothing_strict_was_asked():
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert accepts(json_schema_grammar(schema, strict=False), "1")


def test_a_schema_nested_without_end_is_refused():
    schema: dict = {"type": "integer"}
    for _ in range(3000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequestError, match=r"deep|recursion"):
        json_schema_grammar(schema)


def test_a_large_wrong_schema_is_explained_in_bounded_steps():
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    properties["last"] = {"not": {}}
    with pytest.raises(InvalidRequestError, match="uses not at #"):
        json_schema_grammar({"type": "object", "properties": properties})


# -- patterns and grammars ----------------------------------------------------------


def test_a_regular_expression_matches_the_whole_answer():
    grammar = regex_grammar(r"[0-9]{4}-[0-9]{2}/x")
    assert accepts(grammar, "2024-05/x")
    assert not accepts(grammar, "on 2024-05/x")
    assert walk(grammar, 1) is not None


def test_a_grammar_is_llguidances_lark():
    grammar = lark_grammar('start: "a" b+\nb: "b" | "(" b ")"')
    assert accepts(grammar, "ab(b)")
    assert not accepts(grammar, "a(b")


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (regex_grammar, "(?=a)b", "look-around"),
        (regex_grammar, "a(", "unclosed group"),
        (lark_grammar, 'begin: "a"', "no start rule"),
        (lark_grammar, "start: nothing", "unknown name"),
        (lark_grammar, "", "no start rule"),
        (lark_grammar, "start: <|im_end|>", "special"),
        (lark_grammar, 'start: %json {"not": {}}', "not"),
    ],
)
def test_what_is_no_pattern_or_grammar_is_refused(make, text, words):
    with pytest.raises(InvalidRequestError, match=words):
        make(text)


# -- tool calls ---------------------------------------------------------------------


def tool(name: str, parameters: dict | None = None, **more) -> dict:
    function = {"name": name, **more}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


LOOK = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Rome", "Oslo"]},
        "days": {
            "anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]
        },
        "deep": {"$ref": "#/$defs/deep"},
        "note": {"type": "string"},
    },
    "required": ["city", "deep"],
    "$defs": {
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "array", "items": {"type": "boolean"}}},
            "required": ["x"],
        }
    },
}
TOOLS = [
    tool("look", LOOK),
    tool("look_up", {"type": "object", "properties": {}}),
    tool("go"),
]
STRICT = [tool("look", LOOK, strict=True), *TOOLS[1:]]


def is_look(arguments: dict) -> bool:
    return (
        arguments["city"] in ("Rome", "Oslo")
        and (arguments.get("days") is None or arguments["days"] in range(1, 10))
        and all(type(x) is bool for x in arguments["deep"]["x"])
        and isinstance(arguments.get("note", ""), str)
        and set(arguments) <= set(LOOK["properties"])
    )


def mlx_format(name: str, tokens: LLTokenizer | None = None, *special: str) -> AnswerFormat:
    if name == "plain":
        return PLAIN
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    ids = {token: tokens.tokenize_str(token, parse_special=True)[0] for token in special}
    return AnswerFormat(
        think=None,
        calls=CallFormat(
            name, module.tool_call_start, module.tool_call_end, module.parse_tool_call
        ),
        tokens=ids,
    )


def parsed(answer: str, layout: AnswerFormat, tools=TOOLS, **more) -> list:
    parser = ChannelParser(layout, tools=tools, **more)
    pieces = parser.push(answer) + parser.finish()
    assert not parser.unfinished_call
    found: list = []
    for kind, group in groupby(pieces, key=type):
        group = list(group)
        if kind is CallStart:
            found.append(group[0].name)
        elif kind is CallArguments:
            found[-1] = (found[-1], json.loads("".join(piece.text for piece in group)))
        elif kind in (Text, Reasoning):
            found.append(kind("".join(piece.text for piece in group)))
    return found


GLM = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
FORMATS = {
    "plain": (),
    "json_tools": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "minimax_m2": (),
    "glm47": GLM,
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)


def right(call: tuple, names=("look", "look_up", "go")) -> bool:
    name, arguments = call
    return name in names and (is_look(arguments) if name == "look" else arguments == {})


@EVERY_FORMAT
def test_a_required_call_is_a_right_call_in_every_format(name):
    tokens = vocabulary(*FORMATS[name])
    layout = mlx_format(name, tokens, *FORMATS[name])
    several = answer_grammar(layout, tools=TOOLS, required=True)
    one = answer_grammar(layout, tools=TOOLS, required=True, parallel=False)
    named = answer_grammar(layout, tools=TOOLS, required=True, name="look", parallel=False)
    counts = []
    for seed in range(6):
        for grammar in (several, one, named):
            answer = walk(grammar, seed, tokens)
            if answer is None:
                continue
            calls = parsed(answer, layout)
            assert calls, answer
            assert all(right(call) for call in calls), answer
            if grammar is several:
                counts.append(len(calls))
            else:
                assert len(calls) == 1
            if grammar is named:
                assert calls[0][0] == "look"
    assert max(counts) > 1


@EVERY_FORMAT
def test_calls_of_strict_tools_are_right_in_free_text(name):
    tokens = vocabulary(*FORMATS[name])
    layout = mlx_format(name, tokens, *FORMATS[name])
    grammar = answer_grammar(layout, tools=STRICT)
    start = layout.calls.start
    assert accepts(grammar, "just text {", tokens)
    assert accepts(grammar, f"just {start[:-1]}", tokens)
    assert not accepts(grammar, f"I go. {start}nowhere", tokens)
    head = LLMatcher(tokens, grammar, log_level=0)
    assert head.consume_tokens(tokens.tokenize_str(f"I go. {start}", parse_special=True))
    assert not head.is_accepting()
    answers = [walk(grammar, seed, tokens, f"I go. {start}") for seed in range(6)]
    assert any(answers)
    for answer in filter(None, answers):
        text, *rest = parsed(answer, layout, STRICT)
        assert text == Text("I go.")
        assert right(rest[0]), answer
        assert all(right(part) for part in rest if not isinstance(part, Text)), answer


def test_a_marker_that_is_spelled_in_letters_opens_a_call_too():
    tokens = vocabulary("<tool_call>", "</tool_call>")
    layout = mlx_format("json_tools", tokens, "<tool_call>", "</tool_call>")
    matcher = LLMatcher(tokens, answer_grammar(layout, tools=STRICT), log_level=0)
    letters = [
        token_id for char in "hi <tool_call>" for token_id in tokens.tokenize_str(char)
    ]
    assert matcher.consume_tokens(letters)
    assert not matcher.is_accepting()
    assert not matcher.try_consume_tokens(tokens.tokenize_str("x"))


def test_without_strict_tools_an_answer_is_free():
    assert answer_grammar(PLAIN, tools=TOOLS) is None
    assert answer_grammar(PLAIN) is None


def test_an_answer_with_tools_and_a_schema_is_one_or_the_other():
    grammar = answer_grammar(PLAIN, tools=TOOLS, grammar=json_object_grammar())
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>')
    assert not accepts(grammar, "text")


def test_what_cannot_be_promised_about_calls_is_refused_by_name():
    pythonic = mlx_format("pythonic")
    with pytest.raises(UnsupportedFieldError, match="pythonic") as raised:
        answer_grammar(pythonic, tools=TOOLS, required=True)
    assert raised.value.param == "tool_choice"
    with pytest.raises(UnsupportedFieldError, match="strict") as raised:
        answer_grammar(pythonic, tools=STRICT)
    assert raised.value.param == "tools[0].function.strict"
    with pytest.raises(InvalidRequestError, match="a call of fly") as raised:
        answer_grammar(PLAIN, tools=TOOLS, required=True, name="fly")
    assert raised.value.param == "tool_choice"


def strictly(property_schema: dict) -> list:
    schema = {"type": "object", "properties": {"a": property_schema}, "required": ["a"]}
    return [tool("f", schema, strict=True)]


def test_strict_parameters_that_cannot_be_enforced_are_refused_with_their_place():
    with pytest.raises(
        InvalidRequestError, match="uniqueItems at #/properties/a"
    ) as raised:
        answer_grammar(PLAIN, tools=strictly({"type": "array", "uniqueItems": True}))
    assert raised.value.param == "tools[0].function.parameters"
    with pytest.raises(InvalidRequestError, match="object"):
        answer_grammar(PLAIN, tools=[tool("f", {"type": "array"}, strict=True)])
    tagged = mlx_format("qwen3_coder")
    for schema, words in [
        ({"type": "string", "pattern": "^a"}, "pattern of 'a'"),
        ({"type": ["string", "integer"]}, "a choice of types of 'a'"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            answer_grammar(tagged, tools=strictly(schema))


NOT_ENFORCED = {
    "type": "object",
    "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"type": "string"}},
    "required": ["a"],
}


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        (NOT_ENFORCED, '{"a": [1, 1], "c": 2}'),
        ({"not": {}}, '{"x": [1]}'),
        ({"type": "array"}, '{"x": [1]}'),
        (7, '{"x": [1]}'),
        (None, "{}"),
    ],
)
def test_a_tool_that_is_not_strict_may_have_any_schema(parameters, arguments):
    grammar = answer_grammar(PLAIN, tools=[tool("f", parameters)], required=True)
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    assert accepts(grammar, call % arguments)
    assert not accepts(grammar, call % "[]")
    if parameters is NOT_ENFORCED:
        assert not accepts(grammar, call % "{}")


def test_an_argument_between_tags_that_is_not_enforced_is_any_text():
    layout = mlx_format("qwen3_coder")
    tools = [tool("f", NOT_ENFORCED)]
    grammar = answer_grammar(layout, tools=tools, required=True)
    call = "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"
    answer = call % "<parameter=a>\n[1, 1]\n</parameter>\n"
    assert accepts(grammar, answer)
    assert parsed(answer, layout, tools) == [("f", {"a": [1, 1]})]
    assert not accepts(grammar, call % "")


# -- reasoning ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_model_may_reason_before_what_it_must_write(kind):
    """The markers are tokens of the first vocabulary, and only text in the second."""
    tokenizer = make_tokenizer(kind)
    tokens = tokenizer.grammar_vocabulary(tokenizer.vocab_size)
    ids = tokenizer.answer_format.tokens
    assert bool(ids) is (kind == "byte_level")
    layout = AnswerFormat(THINKS.think, PLAIN_JSON, tokens=ids)
    closed = answer_grammar(layout, grammar=json_object_grammar())
    opened = answer_grammar(layout, grammar=json_object_grammar(), reasoning=True)
    thought, answer = "is it {\n? <", '{"a": 1}'
    assert accepts(closed, answer, tokens)
    assert accepts(closed, f"<think>{thought}</think>\n\n{answer}", tokens)
    assert accepts(opened, f"{thought}</think>{answer}", tokens)
    assert not accepts(opened, answer, tokens)
    assert not accepts(opened, f"{thought}</think>no", tokens)


def test_every_answer_of_a_reasoning_model_ends_in_json():
    ids = {t: VOCABULARY.tokenize_str(t, parse_special=True)[0] for t in THINKS.think}
    layout = AnswerFormat(THINKS.think, PLAIN_JSON, tokens=ids)
    grammar = answer_grammar(layout, grammar=json_schema_grammar(PERSON), reasoning=True)
    answers = [answer for seed in range(12) if (answer := walk(grammar, seed))]
    assert answers
    for answer in answers:
        *_, text = parsed(answer, layout, tools=(), reasoning=True)
        assert is_person(json.loads(text.text))


# -- the model's tokenizer ----------------------------------------------------------


def test_rows_without_a_token_never_match():
    matcher = LLMatcher(VOCABULARY, regex_grammar("(.|\n)*"), log_level=0)
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    assert bits >> (VOCABULARY.vocab_size - 7) == 0
    assert bits >> VOCABULARY.eos_tokens[0] & 1


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_vocabulary_of_a_fast_tokenizer_is_made_once(kind):
    tokenizer = make_tokenizer(kind)
    tokens = tokenizer.grammar_vocabulary(tokenizer.vocab_size + 3)
    assert tokens is tokenizer.grammar_vocabulary(tokenizer.vocab_size + 3)
    assert tokens.vocab_size == tokenizer.vocab_size + 3
    token_ids = tokenizer.encode("the", add_special_tokens=False)
    assert tokens.decode_str(token_ids).strip() == "the"
    assert tokens.eos_tokens == sorted(tokenizer.eos_token_ids)


def test_what_llguidance_cannot_read_has_no_vocabulary_for_grammars():
    assert make_tokenizer("char").grammar_vocabulary(2000) is None
    tokenizer = make_tokenizer()
    assert tokenizer.grammar_vocabulary(tokenizer.vocab_size - 1) is None
