"""Prompts know where the system block, messages and the next turn's common part end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mtplx.errors import InvalidRequestError
from mtplx.text.encoding import Encoding
from mtplx.text.render import render_chat
from mtplx.text.tokenizer import Tokenizer

from .tokenizers_factory import (
    ALTERNATING,
    CHATML,
    LLAMA,
    MISTRAL,
    QWEN,
    THINKING,
    assistant,
    call,
    make_tokenizer,
    make_wrapper,
    result,
    system,
    tool,
    user,
)

# isort: split
from mlx_lm.tokenizer_utils import TokenizerWrapper

TALK = [
    system("You are careful."),
    user("What is Paris?"),
    assistant("A city."),
    user("Is it big?"),
]
KINDS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "char"])
TEMPLATES = pytest.mark.parametrize(
    "template",
    [CHATML, THINKING, ALTERNATING, QWEN, LLAMA, MISTRAL],
    ids=["chatml", "thinking", "alternating", "qwen", "llama", "mistral"],
)


def text_before(kind: str, template: str, messages, index: int, **kwargs) -> str:
    """The part of the rendered text that the first ``index`` tokens stand for."""
    wrapper = make_wrapper(kind, template=template)
    text = wrapper.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **kwargs
    )
    prompt = make_tokenizer(kind, template=template).render_chat(messages, **kwargs)
    if kind == "char":
        rest = wrapper.decode(list(prompt.token_ids[index:]))
        return text.removesuffix(rest)
    if index == len(prompt.token_ids):
        return text
    offsets = wrapper.backend_tokenizer.encode(text, add_special_tokens=False).offsets
    return text[: offsets[index][0]]


@KINDS
@TEMPLATES
def test_tokens_are_those_of_the_rendered_text(kind, template):
    wrapper = make_wrapper(kind, template=template)
    expected = wrapper.apply_chat_template(TALK, add_generation_prompt=True)
    prompt = make_tokenizer(kind, template=template).render_chat(TALK)
    assert list(prompt.token_ids) == expected


@KINDS
def test_edges_of_chatml_are_the_ends_of_its_messages(kind):
    prompt = make_tokenizer(kind).render_chat(TALK)
    heads = [text_before(kind, CHATML, TALK, edge) for edge in prompt.edges]
    wrapper = make_wrapper(kind)
    assert heads == [
        wrapper.apply_chat_template(TALK[:count], tokenize=False) for count in (1, 2, 3, 4)
    ]


@KINDS
@TEMPLATES
@pytest.mark.parametrize("length", [2, 4])
def test_the_next_turn_begins_with_the_stable_prefix(kind, template, length):
    tokenizer = make_tokenizer(kind, template=template)
    now = tokenizer.render_chat(TALK[:length], enable_thinking=False)
    assert now.stable_prefix_len > max(now.edges, default=0)
    for reply in ("Paris.", "0", " x", "\n\nYes", "<think>", "</think>"):
        turns = [*TALK[:length], assistant(reply), user("Why?")]
        later = tokenizer.render_chat(turns, enable_thinking=False)
        stable = now.token_ids[: now.stable_prefix_len]
        assert later.token_ids[: len(stable)] == stable


@KINDS
def test_the_empty_reasoning_of_the_header_is_not_stable(kind):
    tokenizer = make_tokenizer(kind, template=THINKING)
    plain = tokenizer.render_chat(TALK, enable_thinking=True)
    closed = tokenizer.render_chat(TALK, enable_thinking=False)
    assert len(closed.token_ids) > len(plain.token_ids)
    assert plain.stable_prefix_len == len(plain.token_ids)
    assert closed.stable_prefix_len == len(plain.token_ids)


@KINDS
def test_reasoning_that_the_next_turn_loses_is_not_stable(kind):
    tokenizer = make_tokenizer(kind, template=QWEN)
    messages = [
        user("Read it."),
        assistant("Reading.", reasoning_content="A file."),
        result("text"),
    ]
    prompt = tokenizer.render_chat(messages)
    stable = text_before(kind, QWEN, messages, prompt.stable_prefix_len)
    assert stable.endswith("<|im_start|>assistant\n")
    assert "<think>" not in stable
    # Old states stay reachable: the ends of the question, the answer and the result.
    assert len(prompt.edges) == 3


def test_a_message_that_merges_with_its_reply_leaves_the_header_open():
    """The last character of this header belongs to a token of the reply."""

    def template(messages: Sequence, generation_header: bool) -> str:
        text = "".join(f"{m['role']}:\n{m['content']}|" for m in messages)
        return text + ("assistant:\n" if generation_header else "")

    def encode(text: str) -> Encoding:
        spans, start = [], 0
        while start < len(text):
            end = start + 1
            while text[start] == "\n" and text[end : end + 1] == "\n":
                end += 1
            spans.append((start, end))
            start = end
        return Encoding([hash(text[a:b]) for a, b in spans], spans)

    prompt = render_chat([user("hi")], template, encode)
    assert prompt.stable_prefix_len == len(prompt.token_ids) - 1


def test_a_reply_does_not_extend_the_stable_prefix_by_looking_like_the_header():
    def template(messages: Sequence, generation_header: bool) -> str:
        text = "".join(f"{m['role']}:{m['content']}|" for m in messages)
        return text + ("assistant:\n\n" if generation_header else "")

    def encode(text: str) -> Encoding:
        return Encoding(
            [ord(char) for char in text], [(i, i + 1) for i in range(len(text))]
        )

    prompt = render_chat([user("hi")], template, encode)
    assert prompt.stable_prefix_len == len("user:hi|assistant:")


@KINDS
def test_a_refused_part_is_no_edge_and_no_error(kind):
    tokenizer = make_tokenizer(kind, template=THINKING)
    heads = [
        text_before(kind, THINKING, TALK, edge)
        for edge in tokenizer.render_chat(TALK).edges
    ]
    # This template refuses a system message alone, so the block ends where questions part;
    # and it shows an answer that is the last message with its reasoning.
    assert heads[0].endswith("<|im_start|>user\n")
    assert [head.rsplit("\n", 2)[-2].split("<|im_end|>")[0] for head in heads[1:]] == [
        "What is Paris?",
        "Is it big?",
    ]


def test_a_system_text_inside_the_first_message_is_an_edge():
    prompt = make_tokenizer(template=ALTERNATING).render_chat(TALK)
    first = text_before("byte_level", ALTERNATING, TALK, prompt.edges[0])
    assert first == "<|bos|>[INST] You are careful.\n\n"
    other = [TALK[0], user("Something else")]
    again = make_tokenizer(template=ALTERNATING).render_chat(other)
    assert again.edges[0] == prompt.edges[0]
    assert again.token_ids[: again.edges[0]] == prompt.token_ids[: prompt.edges[0]]


def test_an_index_counts_only_where_a_token_starts():
    """The message ends inside a token that its continuation makes longer."""

    def template(messages: Sequence, generation_header: bool) -> str:
        text = "".join(m["content"] for m in messages)
        return text + ("ab" if generation_header else "")

    def encode(text: str) -> Encoding:
        spans = [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]
        return Encoding([hash(text[a:b]) for a, b in spans], spans)

    assert render_chat([user("xyz")], template, encode).edges == ()
    assert render_chat([user("wxyz")], template, encode).edges == (2,)


def test_bytes_of_one_character_do_not_start_at_its_boundary():
    """The first of two tokens for the last character brings the one before it along."""

    def template(messages: Sequence, generation_header: bool) -> str:
        return "a" + ("é" if generation_header else "")

    def encode(text: str) -> Encoding:
        return Encoding([1, 2, 3], [(0, 2), (1, 2), (1, 2)])

    assert render_chat([user("a")], template, encode).edges == ()


@pytest.mark.parametrize("length", [5, 201])
def test_the_number_of_renderings_does_not_grow_with_the_conversation(length):
    wrapper = make_wrapper()
    rendered = []

    def template(messages: Sequence, generation_header: bool) -> str:
        rendered.append(len(messages))
        return wrapper.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_header
        )

    encoded = []

    def encode(text: str) -> Encoding:
        encoded.append(len(text))
        encoding = wrapper.backend_tokenizer.encode(text, add_special_tokens=False)
        return Encoding(encoding.ids, encoding.offsets)

    talk = [system("Be brief."), *[user("Yes?"), assistant("No.")] * length][:length]
    prompt = render_chat(talk, template, encode)
    assert len(prompt.edges) == 5
    assert len(rendered) == 8
    # The whole text is encoded once; the rest are tails.
    assert max(encoded[1:]) < 100


@pytest.mark.parametrize(
    ("template", "messages", "words"),
    [
        (ALTERNATING, [user("a"), user("b")], "roles must alternate"),
        (THINKING, [system("a")], "No user message"),
        (CHATML, [{"role": "user"}], "chat template refuses"),
        (CHATML, [], "chat template refuses"),
    ],
)
def test_a_template_error_reaches_the_user(template, messages, words):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        make_tokenizer(template=template).render_chat(messages)
    assert caught.value.param == "messages"


def test_a_conversation_the_next_turn_cannot_follow_has_no_stable_prefix():
    prompt = make_tokenizer(template=ALTERNATING).render_chat([user("a"), assistant("b")])
    assert prompt.stable_prefix_len == 0
    assert prompt.edges


def test_an_empty_prompt_is_refused():
    with pytest.raises(InvalidRequestError, match="empty prompt"):
        make_tokenizer(template="{{ '' }}").render_chat([user("a")])


def test_a_template_cannot_change_the_messages_it_is_given():
    def pop(messages: list[dict[str, str]], **_: object) -> str:
        return messages[0].pop("content")

    inner = make_wrapper()._tokenizer
    messages = [user("kept")]
    Tokenizer(TokenizerWrapper(inner, chat_template=pop)).render_chat(messages)
    assert messages == [user("kept")]


TOOLS = [tool("read", path="string"), tool("list")]
CALL = assistant("", tool_calls=[call("read", '{"path": "a"}')])
TOOL_TEMPLATES = pytest.mark.parametrize(
    "template", [CHATML, QWEN, LLAMA, MISTRAL], ids=["chatml", "qwen", "llama", "mistral"]
)


@KINDS
@TOOL_TEMPLATES
def test_with_tools_a_call_or_a_question_may_come_next(kind, template):
    tokenizer = make_tokenizer(kind, template=template)
    thought = assistant("", reasoning_content="Hm.", tool_calls=CALL["tool_calls"])
    for messages in (
        [user("Hi")],
        [system("Be brief."), user("Hi"), CALL, result("x")],
        [system("Be brief."), user("Hi"), thought, result("x")],
    ):
        now = tokenizer.render_chat(messages, tools=TOOLS)
        stable = now.token_ids[: now.stable_prefix_len]
        assert stable
        for turn in (
            [assistant("Yes"), user("Why?")],
            [assistant("\n\n0"), user("Why?")],
            [CALL, result("y")],
            [thought, result("y")],
            [assistant("So", tool_calls=CALL["tool_calls"]), result("y")],
        ):
            later = tokenizer.render_chat([*messages, *turn], tools=TOOLS)
            assert later.token_ids[: len(stable)] == stable


@KINDS
@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (QWEN, ["}}}}<|im_end|>\n"]),
        (LLAMA, ["Be brief.<|im_end|>", "}}}}\n\n"]),
        (MISTRAL, ["Be brief.<|im_end|>", "}}}}][/AVAILABLE_TOOLS][INST] "]),
    ],
    ids=["qwen", "llama", "mistral"],
)
def test_the_system_block_and_the_tools_end_at_edges(kind, template, ends):
    prompt = make_tokenizer(kind, template=template).render_chat(
        [system("Be brief."), user("Hi")], tools=TOOLS
    )
    heads = [prompt.text[:char] for char in prompt.edge_chars]
    assert all(head.endswith(end) for head, end in zip(heads, ends, strict=False))
    # Then comes the end of the question, where there is a header after it.
    assert len(heads) == len(ends) + (template != MISTRAL)


def test_tools_without_a_system_message_end_at_an_edge():
    prompt = make_tokenizer(template=QWEN).render_chat([user("Hi")], tools=TOOLS)
    assert prompt.text[: prompt.edge_chars[0]].endswith("<|im_end|>\n<|im_start|>user\n")


@KINDS
def test_an_edge_is_where_it_was_asked_for(kind):
    talk = [*TALK, *[assistant("No."), user("Why?")] * 4]
    tokenizer = make_tokenizer(kind)
    usual = tokenizer.render_chat(talk)
    asked = tokenizer.render_chat(talk, edge_after=[1, len(talk) - 1])
    (edge,) = set(asked.edges) - set(usual.edges)
    assert text_before(kind, CHATML, talk, edge).endswith("What is Paris?<|im_end|>\n")


@KINDS
@TEMPLATES
@pytest.mark.parametrize("begun", ["It is", "It is \n", ""])
def test_a_begun_answer_stays_open(kind, template, begun):
    tokenizer = make_tokenizer(kind, template=template)
    talk = [*TALK, assistant(begun)]
    prompt = tokenizer.render_chat(talk, continue_final_message=True)
    assert prompt.text.endswith(begun)
    whole = tokenizer.render_chat([*talk[:-1], assistant("It is \nbig."), user("Oh")])
    # This template takes the empty reasoning away again.
    assert whole.text.startswith(prompt.text) or template == THINKING
    stable = prompt.token_ids[: prompt.stable_prefix_len]
    assert whole.token_ids[: len(stable)] == stable
    assert prompt.edge_chars[-1] <= len(prompt.text) - len(begun)
    assert prompt.stable_prefix_len > 0


@pytest.mark.parametrize(
    "messages", [[], [user("a")], [user("a"), CALL]], ids=["none", "user", "call"]
)
def test_only_an_answer_can_be_continued(messages):
    with pytest.raises(InvalidRequestError, match="assistant") as caught:
        make_tokenizer().render_chat(messages, continue_final_message=True)
    assert caught.value.param == "messages"


def test_a_template_that_hides_the_begun_answer_is_refused():
    template = "{% for m in messages[:1] %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="does not show the last message"):
        make_tokenizer(template=template).render_chat(
            [user("a"), assistant("b")], continue_final_message=True
        )


@KINDS
def test_a_late_system_message_stays_in_its_place(kind):
    talk = [*TALK[:3], system("Now in French."), TALK[3]]
    for template in (CHATML, QWEN, LLAMA):
        text = make_tokenizer(kind, template=template).render_chat(talk).text
        assert text.index("A city.") < text.index("Now in French.") < text.index("Is it")
    with pytest.raises(InvalidRequestError, match="refuses these messages"):
        make_tokenizer(kind, template=ALTERNATING).render_chat(talk)
