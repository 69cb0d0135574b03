"""Reasoning, text and calls of an answer come out apart, however it is cut."""

from __future__ import annotations

import importlib
import json
from itertools import groupby, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mtplx.text.channels import (
    AnswerFormat,
    ChannelParser,
    Reasoning,
    Text,
    read_answer_format,
)
from mtplx.text.tokenizer import Tokenizer
from mtplx.text.tool_calls import (
    PLAIN_JSON,
    CallArguments,
    CallEnd,
    CallFormat,
    CallStart,
)

from .tokenizers_factory import CHATML, make_wrapper, user

THINKS = AnswerFormat(think=("<think>", "</think>"), calls=PLAIN_JSON)
PLAIN = AnswerFormat(think=None, calls=PLAIN_JSON)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "options": {"type": "object"},
            },
        },
    },
}
TOOLS = [WEATHER]


def mlx_format(name: str) -> AnswerFormat:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{name}")
    return AnswerFormat(
        think=("<think>", "</think>"),
        calls=CallFormat(
            name, module.tool_call_start, module.tool_call_end, module.parse_tool_call
        ),
    )


def joined(pieces: list) -> list:
    """Pieces of one kind that follow each other as one."""
    whole = []
    for kind, group in groupby(pieces, key=type):
        group = list(group)
        if kind in (Text, Reasoning, CallArguments):
            group = [kind("".join(piece.text for piece in group))]
        whole += group
    return whole


def read(
    answer: str, layout: AnswerFormat = THINKS, *, tools=TOOLS, truncated=False, **more
):
    parser = ChannelParser(layout, tools=tools, **more)
    return joined(parser.push(answer) + parser.finish(truncated=truncated))


def call(name: str, arguments: str) -> list:
    return [CallStart(name), CallArguments(arguments), CallEnd()]


# -- reasoning ----------------------------------------------------------------------


def test_reasoning_and_text_come_apart_without_the_newlines_between_them():
    assert read("<think>\nHm.\nYes.\n</think>\n\nParis.\n\nIn France.\n") == [
        Reasoning("Hm.\nYes."),
        Text("Paris.\n\nIn France.\n"),
    ]


def test_an_answer_may_begin_inside_reasoning():
    assert read("Hm.\n</think>\n\nParis.", reasoning=True) == [
        Reasoning("Hm."),
        Text("Paris."),
    ]


def test_empty_reasoning_is_none():
    assert read("<think>\n\n</think>\n\nParis.") == [Text("Paris.")]


@pytest.mark.parametrize("reasoning", [True, False])
def test_a_marker_that_is_out_of_place_is_not_shown(reasoning):
    kind = Reasoning if reasoning else Text
    stray = "<think>" if reasoning else "</think>"
    assert read(f"{stray}\nParis.", reasoning=reasoning) == [kind("Paris.")]


def test_reasoning_that_is_cut_off_stays_reasoning():
    assert read("<think>\nHm. <", truncated=True) == [Reasoning("Hm. <")]


def test_tokens_of_reasoning_are_counted():
    parser = ChannelParser(THINKS, tools=TOOLS)
    for piece in ["<thi", "nk>", "a b", "</think>", "c", "d"]:
        parser.push(piece, (1, 2))
    # The first piece could still have been text.
    assert parser.reasoning_tokens == 6


def test_a_model_without_markers_passes_text_on_as_it_comes():
    parser = ChannelParser(PLAIN)
    pieces = ["  a <think> \n", "\n", " ", "<tool_call>{}"]
    assert [parser.push(piece) for piece in pieces] == [[Text(p)] for p in pieces]
    assert parser.finish() == []


def test_text_is_held_no_longer_than_a_marker_could_begin():
    parser = ChannelParser(THINKS, tools=TOOLS)
    assert parser.push("one <") == [Text("one")]
    assert parser.push("b> two") == [Text(" <b> two")]
    assert parser.push(" ") == []
    assert parser.finish() == [Text(" ")]


# -- calls in JSON ------------------------------------------------------------------

ONE = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n'
    "</tool_call>"
)


def test_text_around_calls_is_kept_and_whitespace_between_markers_is_not():
    assert read(f"I look.\n\n{ONE}\n{ONE}\nDone.") == [
        Text("I look."),
        *call("weather", '{"city": "Köln", "days": 2}'),
        *call("weather", '{"city": "Köln", "days": 2}'),
        Text("Done."),
    ]


def test_arguments_are_streamed_as_they_are_written():
    parser = ChannelParser(PLAIN, tools=TOOLS)
    assert parser.push('<tool_call>\n{"name": "weather", "argum') == []
    assert parser.push('ents":') == []
    assert parser.push(' {"ci') == [CallStart("weather"), CallArguments('{"ci')]
    assert parser.push('ty":  "}') == [CallArguments('ty":  "}')]
    assert parser.push('\\""}') == [CallArguments('\\""}')]
    assert parser.push("}\n") == [CallEnd()]
    assert parser.push("</tool_call>") == []
    assert parser.finish() == []
    assert not parser.unfinished_call


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "weather", "parameters": {"city": "Rome"}}', '{"city": "Rome"}'),
        ('{"arguments": {"city": "Rome"}, "name": "weather"}', '{"city": "Rome"}'),
        ('{"name":"weather","arguments":"{\\"city\\":\\"Rome\\"}"}', '{"city":"Rome"}'),
        ('{"name": "weather", "id": 7, "arguments": {}}', "{}"),
        ('{"name": "weather"}', "{}"),
        ('{"name": "weather", "arguments": null}', "{}"),
        ('{"name": "weather", "arguments": {"a": [{"b": "}]"}]}', '{"a": [{"b": "}]"}]}'),
        (
            '{"name": "weather", "arguments": {"city": "</tool_call>"}}',
            '{"city": "</tool_call>"}',
        ),
    ],
    ids=[
        "parameters",
        "name last",
        "string",
        "other keys",
        "none",
        "null",
        "no end",
        "tag",
    ],
)
def test_other_spellings_of_a_call_in_json(body, arguments):
    assert read(f"<tool_call>{body}</tool_call>") == call("weather", arguments)


def test_one_pair_of_markers_may_hold_a_list_of_calls():
    body = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]'
    assert read(f"<tool_call>{body}</tool_call>") == [
        *call("a", "{}"),
        *call("b", '{"x": 1}'),
    ]


def test_a_name_that_no_tool_has_is_passed_on():
    answer = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    assert read(answer) == call("time", "{}")


@pytest.mark.parametrize(
    "body", ["no json", '{"arguments": {}}', '{"name": "weather", "arguments": [1]}', "{{"]
)
def test_what_is_no_call_is_given_back_as_text(body, caplog):
    answer = f"See:\n<tool_call>\n{body}\n</tool_call> so"
    assert read(answer) == [Text(f"See:\n{body} so")]
    assert "could not be read" in caplog.text


def test_a_call_without_its_end_counts_if_the_model_ended_the_answer():
    assert read(ONE.removesuffix("\n</tool_call>")) == call(
        "weather", '{"city": "Köln", "days": 2}'
    )


def test_a_call_that_is_cut_off_keeps_what_was_streamed_and_is_unfinished():
    parser = ChannelParser(PLAIN, tools=TOOLS)
    pieces = parser.push(ONE[:57]) + parser.finish(truncated=True)
    assert pieces == [CallStart("weather"), CallArguments('{"city": "Kö')]
    assert parser.unfinished_call


@pytest.mark.parametrize("answer", ["<tool_call>", '<tool_call>\n{"name": "weather"'])
def test_a_call_that_is_cut_off_before_its_arguments_is_unfinished(answer):
    parser = ChannelParser(PLAIN, tools=TOOLS)
    assert parser.push(answer) + parser.finish(truncated=True) == []
    assert parser.unfinished_call


def test_a_complete_call_before_the_cut_stays():
    parser = ChannelParser(PLAIN, tools=TOOLS)
    pieces = parser.push(f"{ONE}\n<tool_call>\n") + parser.finish(truncated=True)
    assert joined(pieces) == call("weather", '{"city": "Köln", "days": 2}')
    assert parser.unfinished_call


def test_without_tools_the_markers_of_calls_are_text():
    assert read(ONE, tools=()) == [Text(ONE)]


# -- calls in other formats ---------------------------------------------------------

NESTED = {"city": "Köln", "days": 2, "options": {"units": ["C", "F"], "deep": {"x": "}"}}}
NESTED_JSON = json.dumps(NESTED, ensure_ascii=False)
OPTIONS_JSON = json.dumps(NESTED["options"])
IN_OTHER_FORMATS = {
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=options>\n"
        f"{OPTIONS_JSON}\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n<arg_key>options</arg_key>\n"
        f"<arg_value>{OPTIONS_JSON}</arg_value>\n</tool_call>"
    ),
    "mistral": f"[TOOL_CALLS]weather[ARGS]{NESTED_JSON}",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{NESTED_JSON}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "pythonic": (
        '<|tool_call_start|>[weather(city="Köln", days=2, '
        f"options={OPTIONS_JSON})]<|tool_call_end|>"
    ),
    "longcat": (
        "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Köln</longcat_arg_value>\n<longcat_arg_key>days"
        "</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n<longcat_arg_key>"
        "options</longcat_arg_key>\n"
        f"<longcat_arg_value>{OPTIONS_JSON}</longcat_arg_value>\n</longcat_tool_call>"
    ),
}
OTHER_FORMATS = pytest.mark.parametrize("name", IN_OTHER_FORMATS)


@OTHER_FORMATS
def test_mlx_lm_reads_every_other_format_with_nested_arguments(name):
    answer = f"<think>\nHm.\n</think>\n\nI look.\n{IN_OTHER_FORMATS[name]}"
    thought, text, start, arguments, end = read(answer, mlx_format(name))
    assert (thought, text) == (Reasoning("Hm."), Text("I look."))
    assert (start, end) == (CallStart("weather"), CallEnd())
    assert json.loads(arguments.text) == NESTED


@OTHER_FORMATS
def test_several_calls_in_every_other_format(name):
    pieces = read("\n".join([IN_OTHER_FORMATS[name]] * 2), mlx_format(name))
    assert [type(piece) for piece in pieces] == [CallStart, CallArguments, CallEnd] * 2


@OTHER_FORMATS
def test_every_other_format_that_is_cut_off_is_unfinished(name):
    parser = ChannelParser(mlx_format(name), tools=TOOLS)
    cut = IN_OTHER_FORMATS[name][:-20]
    assert parser.push(cut) + parser.finish(truncated=True) == []
    assert parser.unfinished_call


def test_a_refused_call_in_another_format_is_text():
    answer = "<tool_call>\nfunction weather\n</tool_call>"
    assert read(answer, mlx_format("qwen3_coder")) == [Text("function weather")]


def test_a_tool_without_parameters_is_no_trouble_for_a_parser_that_wants_them():
    tools = [{"type": "function", "function": {"name": "weather"}}]
    pieces = read(IN_OTHER_FORMATS["longcat"], mlx_format("longcat"), tools=tools)
    assert pieces[0] == CallStart("weather")


# -- any cut ------------------------------------------------------------------------

FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool",
    "</",
    "\n",
    " ",
    "word",
    "é",
    '{"name": "weather", "arguments": {"city": "a</tool_call>\\""}}',
    '{"arguments": {"a": [1, {}]}, "name": "f"}',
    '{"name": "f", "arguments"',
    ": {",
    "}",
    '"',
    ONE,
]
answers = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@given(
    answers,
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
    st.booleans(),
    st.sampled_from([THINKS, PLAIN]),
)
def test_any_cut_gives_what_one_piece_gives(answer, cuts, reasoning, truncated, layout):
    cuts = sorted({0, len(answer), *(cut for cut in cuts if cut < len(answer))})
    parser = ChannelParser(layout, tools=TOOLS, reasoning=reasoning)
    pieces = []
    for start, end in pairwise(cuts):
        pieces += parser.push(answer[start:end])
    pieces += parser.finish(truncated=truncated)
    assert joined(pieces) == read(answer, layout, reasoning=reasoning, truncated=truncated)


@given(st.text("<>/think tool_call\n", max_size=60))
def test_text_without_markers_is_not_changed(answer):
    markers = [*THINKS.think, PLAIN_JSON.start, PLAIN_JSON.end]
    assume(not any(marker in answer for marker in markers))
    assert read(answer) == ([Text(answer)] if answer else [])


@OTHER_FORMATS
@given(size=st.integers(1, 12))
def test_any_cut_of_every_other_format(name, size):
    answer = f"<think>a</think> b\n{IN_OTHER_FORMATS[name]}\n"
    parser = ChannelParser(mlx_format(name), tools=TOOLS)
    pieces = []
    for start in range(0, len(answer), size):
        pieces += parser.push(answer[start : start + size])
    assert joined(pieces + parser.finish()) == read(answer, mlx_format(name))


# -- the model's tokenizer ----------------------------------------------------------


def tokenizer_with(*special: str, parser: str = "json_tools"):
    wrapper = make_wrapper("byte_level", template=CHATML + "{{ tools }}")
    wrapper._tokenizer.add_tokens(list(special), special_tokens=True)
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    return Tokenizer(
        type(wrapper)(
            wrapper._tokenizer,
            tool_call_start=module.tool_call_start,
            tool_call_end=module.tool_call_end,
            tool_parser=module.parse_tool_call,
        )
    )


def stream(tokenizer: Tokenizer, answer: str, tools=TOOLS) -> list:
    prompt = tokenizer.render_chat([user("Hi")])
    text = tokenizer.text_stream(prompt.token_ids)
    parser = tokenizer.channels(prompt, tools=tools)
    pieces = []
    for token_id in tokenizer.encode(answer, add_special_tokens=False):
        pieces += parser.push(text.push(token_id), (token_id,))
    return joined(pieces + parser.push(text.finish()) + parser.finish())


def test_markers_that_are_special_tokens_are_found_and_other_special_tokens_are_not_shown():
    tokenizer = tokenizer_with("<tool_call>", "</tool_call>")
    assert stream(tokenizer, f"a<|im_start|>b{ONE}<|im_end|>") == [
        Text("ab"),
        *call("weather", '{"city": "Köln", "days": 2}'),
    ]


def test_special_tokens_inside_a_call_reach_the_parser():
    tokenizer = tokenizer_with(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        parser="kimi_k2",
    )
    answer = IN_OTHER_FORMATS["kimi_k2"].replace("ö", "o")
    assert stream(tokenizer, answer)[0] == CallStart("weather")


OPENING = CHATML.replace("assistant\\n' -}}", "assistant\\n<think>\\n' -}}")


@pytest.mark.parametrize(
    ("template", "question", "kind"),
    [
        (OPENING, "Hi", Reasoning),
        (OPENING, "</think>", Reasoning),
        (CHATML, "Hi", Text),
        (CHATML, "What does <think> mean?", Text),
    ],
)
def test_reasoning_begins_where_the_generation_header_says(template, question, kind):
    tokenizer = Tokenizer(make_wrapper("byte_level", template=template))
    prompt = tokenizer.render_chat([user(question)])
    assert tokenizer.channels(prompt).push("so") == [kind("so")]


def test_a_model_without_a_format_of_its_own_uses_plain_json():
    layout = read_answer_format(make_wrapper("byte_fallback"))
    assert (layout.think, layout.calls) == (None, PLAIN_JSON)
    assert read_answer_format(make_wrapper("byte_level")).tokens.keys() == {
        "<think>",
        "</think>",
    }
