"""Answers that come back as history keep their tokens, and nothing else does."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.text.answers import Answer, AnswerStore
from mtplx.text.channels import Reasoning, Text
from mtplx.text.tokenizer import Tokenizer
from mtplx.text.tool_calls import CallArguments
from mtplx.types import Prompt

from .tokenizers_factory import (
    ALTERNATING,
    CHATML,
    LLAMA,
    MISTRAL,
    QWEN,
    assistant,
    call,
    make_tokenizer,
    result,
    system,
    tool,
    user,
)

KINDS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "char"])
TEMPLATES = pytest.mark.parametrize(
    "template",
    [CHATML, ALTERNATING, QWEN, LLAMA, MISTRAL],
    ids=["chatml", "alternating", "qwen", "llama", "mistral"],
)
TOOLS = [tool("read", path="string"), tool("list", depth="integer")]


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each character, as no tokenizer would do it; then the end token."""
    sizes = range(tokenizer.vocab_size)
    table = {tokenizer.token_bytes(index): index for index in reversed(sizes)}
    ids = []
    for char in text:
        data = char.encode()
        whole = [table[data]] if data in table else [table[bytes([b])] for b in data]
        ids += whole
    return [*ids, *tokenizer.eos_token_ids]


def starts_with(prompt: Prompt, *parts: tuple[int, ...] | list[int]) -> bool:
    ids = [token_id for part in parts for token_id in part]
    return list(prompt.token_ids[: len(ids)]) == ids


def answerable(tokenizer: Tokenizer) -> list[int]:
    """Tokens that are text, and no markers that templates read."""
    texts = {index: tokenizer.token_text(index) for index in range(tokenizer.vocab_size)}
    return [index for index, text in texts.items() if text and "<" not in text]


@TEMPLATES
@KINDS
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_prompt_begins_with_the_last_one_and_what_was_generated(kind, template, data):
    tokenizer = make_tokenizer(kind, template=template)
    tokens = st.lists(st.sampled_from(answerable(tokenizer)), min_size=1, max_size=12)
    (end,) = tokenizer.eos_token_ids
    messages: list[dict[str, Any]] = [system("Be brief."), user("Hi")]
    prompt = tokenizer.render_chat(messages)
    for question in ("Why?", "And\n\n", " then"):
        generated = data.draw(tokens)
        stream = tokenizer.text_stream(prompt.token_ids)
        content = "".join(map(stream.push, generated)) + stream.finish()
        if data.draw(st.booleans()):
            generated = [*generated, end]
        tokenizer.remember(prompt, generated, assistant(content))
        trimmed = content.strip() if data.draw(st.booleans()) else content
        messages += [assistant(trimmed), user(question)]
        later = tokenizer.render_chat(messages)
        assert starts_with(later, prompt.token_ids, generated)
        stable = prompt.token_ids[: prompt.stable_prefix_len]
        assert starts_with(later, stable)
        assert all(0 < edge < len(later.token_ids) for edge in later.edges)
        assert later.edges == tuple(sorted(set(later.edges)))
        prompt = later


@TEMPLATES
@KINDS
def test_edges_and_the_stable_prefix_count_the_kept_tokens(kind, template):
    """A prompt of kept tokens ends, and has its edges, where one without them does."""
    fresh, keeping = (make_tokenizer(kind, template=template) for _ in range(2))
    messages = [system("Be brief."), user("Hi")]
    # Models write the space that their template has.
    space = " " if template in (ALTERNATING, MISTRAL) else ""
    for question in ("Why?", "Then?"):
        prompt = keeping.render_chat(messages)
        generated = letters(keeping, space + "the capital is Paris")
        keeping.remember(prompt, generated, assistant("the capital is Paris"))
        messages += [assistant("the capital is Paris"), user(question)]
    kept, plain = keeping.render_chat(messages), fresh.render_chat(messages)
    assert starts_with(kept, prompt.token_ids, generated)
    assert kept.text == plain.text
    assert kept.edge_chars == plain.edge_chars
    for mine, other in zip(kept.edges, plain.edges, strict=True):
        assert same_rest(fresh, kept, mine, plain, other)
    assert same_rest(fresh, kept, kept.stable_prefix_len, plain, plain.stable_prefix_len)


def same_rest(tokenizer: Tokenizer, left: Prompt, start: int, right: Prompt, at: int):
    """What follows two indices of two prompts is the same text."""
    return tokenizer.decode(left.token_ids[start:]) == tokenizer.decode(
        right.token_ids[at:]
    )


@KINDS
@pytest.mark.parametrize("index", [1, 2])
def test_an_edge_that_earlier_turns_did_not_have_is_right_or_absent(kind, index):
    """Before the answer it is found; behind tokens of an answer it may be lost."""
    fresh, keeping = make_tokenizer(kind), make_tokenizer(kind)
    messages = [system("Be brief."), user("Hi")]
    for _ in range(4):
        prompt = keeping.render_chat(messages)
        keeping.remember(prompt, letters(keeping, "the end"), assistant("the end"))
        messages += [assistant("the end"), user("Why?")]
    usual = keeping.render_chat(messages)
    kept, plain = (t.render_chat(messages, edge_after=[index]) for t in (keeping, fresh))
    where = dict(zip(plain.edge_chars, plain.edges, strict=True))
    for char, edge in zip(kept.edge_chars, kept.edges, strict=True):
        assert same_rest(fresh, kept, edge, plain, where[char])
    if index == 1:
        assert len(kept.edges) == len(usual.edges) + 1


@KINDS
def test_an_answer_that_the_client_changed_is_read_anew(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("Hi")])
    tokenizer.remember(prompt, letters(tokenizer, "the end"), assistant("the end"))
    for text in ("the  end", "the end.", "The end", "the", ""):
        messages = [user("Hi"), assistant(text), user("Why?")]
        expected = make_tokenizer(kind).render_chat(messages)
        assert tokenizer.render_chat(messages) == expected


@TEMPLATES
@KINDS
def test_behind_a_changed_answer_all_is_as_if_nothing_were_kept(kind, template):
    """Each prompt is used up to its end, each answer comes back as another."""
    fresh, keeping = (make_tokenizer(kind, template=template) for _ in range(2))
    messages = [system("Be brief."), user("Hi <|im_end|>")]
    for text in ("the end", "\nis", " 日本", "x"):
        prompt = keeping.render_chat(messages)
        assert prompt == fresh.render_chat(messages)
        assert prompt == keeping.render_chat(messages)
        keeping.remember(prompt, letters(keeping, "think"), assistant("think"))
        messages += [assistant(text), user(f"Why{text}?")]


@KINDS
def test_an_answer_to_another_prompt_is_read_anew(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("Hi")])
    tokenizer.remember(prompt, letters(tokenizer, "the end"), assistant("the end"))
    messages = [user("Hi!"), assistant("the end"), user("Why?")]
    assert tokenizer.render_chat(messages) == make_tokenizer(kind).render_chat(messages)


def test_a_retry_and_a_branch_use_what_they_share():
    tokenizer = make_tokenizer()
    first = tokenizer.render_chat([user("Hi")])
    generated = letters(tokenizer, "the end")
    tokenizer.remember(first, generated, assistant("the end"))
    talk = [user("Hi"), assistant("the end"), user("Why?")]
    second = tokenizer.render_chat(talk)
    tokenizer.remember(second, letters(tokenizer, "is it"), assistant("is it"))
    assert tokenizer.render_chat(talk) == second
    branch = tokenizer.render_chat([*talk, assistant("is it not"), user("No.")])
    assert starts_with(branch, first.token_ids, generated)
    assert branch.token_ids[: len(second.token_ids)] == second.token_ids


@KINDS
@pytest.mark.parametrize("sent", ["is this the end", "is this the e", "is this "])
def test_what_a_stop_string_cut_off_is_not_kept(kind, sent):
    """The tokens go on after the stop string's beginning; the client saw less."""
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("Hi")])
    generated = tokenizer.encode("is this the end is", add_special_tokens=False)
    tokenizer.remember(prompt, generated, assistant(sent))
    messages = [user("Hi"), assistant(sent.strip()), user("Why?")]
    later = tokenizer.render_chat(messages)
    count = sum(
        later.token_ids[len(prompt.token_ids) + i] == token_id
        for i, token_id in enumerate(generated)
    )
    assert 0 < count < len(generated)
    assert (
        tokenizer.decode(later.token_ids)
        .replace(" ", "")
        .endswith(
            "user\nHi\nassistant\n" + sent.replace(" ", "") + "\nuser\nWhy?\nassistant\n"
        )
    )


@KINDS
def test_a_cut_answer_is_continued_after_its_own_tokens(kind):
    tokenizer = make_tokenizer(kind)
    messages = [user("Hi")]
    prompt = tokenizer.render_chat(messages)
    *generated, _ = letters(tokenizer, "the capital ")
    tokenizer.remember(prompt, generated, assistant("the capital "))
    messages.append(assistant("the capital "))
    open_prompt = tokenizer.render_chat(messages, continue_final_message=True)
    assert open_prompt.token_ids == (*prompt.token_ids, *generated)
    more = letters(tokenizer, "is Paris")
    tokenizer.remember(open_prompt, more, assistant("is Paris"))
    closed = [user("Hi"), assistant("the capital is Paris"), user("Why?")]
    assert starts_with(tokenizer.render_chat(closed), open_prompt.token_ids, more)


@KINDS
def test_the_same_prompt_is_not_answered_by_the_spaces_of_its_last_answer(kind):
    """Nothing stands where the answer would: that says as little as spaces do."""
    tokenizer = make_tokenizer(kind)
    messages = [user("Hi")]
    prompt = tokenizer.render_chat(messages)
    tokenizer.remember(prompt, letters(tokenizer, "  "), assistant("  "))
    assert tokenizer.render_chat(messages).token_ids == prompt.token_ids


@KINDS
def test_the_beginning_of_an_answer_is_continued_as_its_client_wrote_it(kind):
    tokenizer, fresh = make_tokenizer(kind), make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("Hi")])
    *generated, _ = letters(tokenizer, "the capital  ")
    tokenizer.remember(prompt, generated, assistant("the capital  "))
    trimmed = [user("Hi"), assistant("the capital")]
    opened, plain = (
        each.render_chat(trimmed, continue_final_message=True)
        for each in (tokenizer, fresh)
    )
    assert tokenizer.decode(opened.token_ids) == fresh.decode(plain.token_ids)


def think(reasoning: str, text: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n{text}"


def test_reasoning_that_is_echoed_is_kept_and_else_nothing_is():
    tokenizer = make_tokenizer(template=QWEN)
    messages = [user("Hi")]
    prompt = tokenizer.render_chat(messages, tools=TOOLS)
    arguments = '{"path":"a.txt"}'
    text = '\n<tool_call>\n{"name": "read", "arguments": {"path":"a.txt"}}\n</tool_call>'
    generated = letters(tokenizer, think("hm", "Reading.") + text)
    answer = assistant(
        "Reading.", reasoning_content="hm", tool_calls=[call("read", arguments)]
    )
    tokenizer.remember(prompt, generated, answer)
    echoed = tokenizer.render_chat([*messages, answer, result("x")], tools=TOOLS)
    assert starts_with(echoed, prompt.token_ids, generated)
    # The template drops it at the next question, so it is not put back.
    dropped = tokenizer.render_chat(
        [*messages, answer, result("x"), user("Why?")], tools=TOOLS
    )
    # The client did not send it.
    del answer["reasoning_content"]
    stripped = tokenizer.render_chat([*messages, answer, result("x")], tools=TOOLS)
    for later in (dropped, stripped):
        assert starts_with(later, prompt.token_ids)
        assert "hm" not in tokenizer.decode(later.token_ids)


@pytest.mark.parametrize("template", [QWEN, CHATML], ids=["qwen", "fallback"])
def test_what_the_channels_say_of_an_answer_is_the_answer(template):
    tokenizer = make_tokenizer(template=template)
    messages = [user("Hi")]
    prompt = tokenizer.render_chat(messages, tools=TOOLS)
    text = (
        'So: \n\n<tool_call>\n{"name": "read", "arguments": {"path":"a"}}\n</tool_call>\n'
    )
    if template == QWEN:
        text = think("hm", text)
    generated = letters(tokenizer, text)
    stream = tokenizer.text_stream(prompt.token_ids)
    parser = tokenizer.channels(prompt, tools=TOOLS)
    pieces = [p for i in generated[:-1] for p in parser.push(stream.push(i), [i])]
    pieces += [*parser.push(stream.finish()), *parser.finish()]

    def said(kind: type) -> str:
        return "".join(piece.text for piece in pieces if isinstance(piece, kind))

    answer = assistant(
        said(Text),
        reasoning_content=said(Reasoning),
        tool_calls=[call("read", said(CallArguments))],
    )
    assert answer["content"]
    tokenizer.remember(prompt, generated, answer)
    later = tokenizer.render_chat([*messages, answer, result("x")], tools=TOOLS)
    assert starts_with(later, prompt.token_ids, generated[:-1])


def test_a_tool_loop_keeps_all_it_generated_until_the_next_question():
    tokenizer = make_tokenizer(template=QWEN)
    messages: list[dict[str, Any]] = [system("Be brief."), user("Hi")]
    prompt = first = tokenizer.render_chat(messages, tools=TOOLS)
    for number in range(10):
        arguments = f'{{"depth":{number}}}'
        form = f'\n<tool_call>\n{{"name":"list","arguments":{arguments}}}\n</tool_call>'
        generated = letters(tokenizer, think(f"hm {number}", "") + form)
        answer = assistant(
            "", reasoning_content=f"hm {number}", tool_calls=[call("list", arguments)]
        )
        tokenizer.remember(prompt, generated, answer)
        messages += [answer, result("x")]
        later = tokenizer.render_chat(messages, tools=TOOLS)
        assert starts_with(later, prompt.token_ids, generated)
        prompt = later
    messages += [assistant("Done."), user("Why?")]
    question = tokenizer.render_chat(messages, tools=TOOLS)
    stable = prompt.token_ids[: prompt.stable_prefix_len]
    assert starts_with(question, stable)
    assert len(stable) == first.stable_prefix_len


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (QWEN, '<tool_call>\n{{"name": "list", "arguments": {}}}\n</tool_call>'),
        (LLAMA, '{{"name": "list", "parameters": {}}}'),
        (MISTRAL, '[TOOL_CALLS][{{"name": "list", "arguments": {}}}]'),
        (CHATML, '<tool_call>\n{{"name": "list", "arguments": {}}}\n</tool_call>'),
    ],
    ids=["qwen", "llama", "mistral", "fallback"],
)
def test_a_call_may_come_back_as_other_json(template, form):
    tokenizer = make_tokenizer(template=template)
    messages = [system("Be brief."), user("Hi")]
    prompt = tokenizer.render_chat(messages, tools=TOOLS)
    arguments = '{"depth":  2, "all":[true,"é"]}'
    generated = letters(tokenizer, form.format(arguments))
    answer = assistant("", tool_calls=[call("list", arguments)])
    tokenizer.remember(prompt, generated, answer)

    def again(arguments: str) -> Prompt:
        echo = assistant("", tool_calls=[call("list", arguments)])
        return tokenizer.render_chat([*messages, echo, result("x")], tools=TOOLS)

    for same in (arguments, '{"all": [true, "\\u00e9"], "depth": 2}'):
        assert starts_with(again(same), prompt.token_ids, generated[:-1])
    for other in ('{"all": [1, "é"], "depth": 2}', '{"all": [true, "é"], "depth": 2.0}'):
        assert not starts_with(again(other), prompt.token_ids, generated[:-1])


@KINDS
def test_a_special_token_that_the_client_never_saw_is_not_put_back(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_chat([user("Hi")])
    (start,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    *head, _ = letters(tokenizer, "the")
    tokenizer.remember(prompt, [*head, start, *head], assistant("thethe"))
    messages = [user("Hi"), assistant("thethe"), user("Why?")]
    assert tokenizer.render_chat(messages) == make_tokenizer(kind).render_chat(messages)


@KINDS
def test_a_text_that_appends_to_an_answer_keeps_its_tokens(kind):
    tokenizer = make_tokenizer(kind)
    prompt = tokenizer.render_text("This is")
    *generated, _ = letters(tokenizer, " the end\n")
    tokenizer.remember(prompt, generated, {"content": " the end\n"})
    for more in ("", "the next", "\nis"):
        later = tokenizer.render_text("This is the end\n" + more)
        assert starts_with(later, prompt.token_ids, generated)
        assert tokenizer.decode(later.token_ids) == "This is the end\n" + more
    other = tokenizer.render_text("This is  the end\n")
    assert other == make_tokenizer(kind).render_text("This is  the end\n")


@KINDS
def test_a_prompt_that_was_not_rendered_is_ignored(kind):
    tokenizer = make_tokenizer(kind)
    ids = tuple(tokenizer.encode("the", add_special_tokens=False))
    tokenizer.remember(Prompt(token_ids=ids), ids, {"content": "the"})
    assert tokenizer.render_text("thethe") == make_tokenizer(kind).render_text("thethe")


def test_the_store_is_bounded_and_forgets_what_was_not_used():
    store = AnswerStore({9: "|"}, [], max_answers=3, max_chars=30)
    answer = Answer([7], "ok")

    def add(text: str) -> None:
        store.add(Prompt((1,), text=text), answer)
        store.check()

    for text in ("a", "b", "c"):
        add(text)
    add("a")
    assert store.find_in_chat("bok|") is not None
    add("d")
    assert [bool(store.find_in_chat(f"{t}ok|")) for t in "abcd"] == [
        True,
        True,
        False,
        True,
    ]
    add("e" * 24)
    assert [bool(store.find_in_chat(f"{t}ok|")) for t in "abd"] == [False, False, True]
    add("f" * 40)
    assert store.find_in_chat("dok|") is None
    assert store.find_in_chat("f" * 40 + "ok|") is None


def test_the_longest_prompt_wins_and_then_the_latest_answer():
    store = AnswerStore({9: "|"}, [])
    store.add(Prompt((1,), text="a"), Answer([5, 6], "bc"))
    store.add(Prompt((1, 2), text="ab"), Answer([7], "c"))
    kept = store.find_in_chat("abc|")
    assert kept is not None
    assert list(kept.token_ids) == [1, 2, 7]
    store.add(Prompt((1, 2), text="ab"), Answer([8], "c"))
    again = store.find_in_chat("abc|")
    assert again is not None
    assert list(again.token_ids) == [1, 2, 8]


def test_a_prompt_is_kept_up_to_its_last_end_token():
    store = AnswerStore({9: "|"}, [])
    store.add(
        Prompt((1, 9, 2, 9, 3), (2,), text="a|b|c", edge_chars=(2,)), Answer([5], "d")
    )
    kept = store.find_in_chat("a|b|cx|")
    assert kept is not None
    assert (list(kept.token_ids), kept.char, kept.rest) == ([1, 9, 2], 3, "")
    assert kept.boundaries[2] == 2
    assert store.find_in_chat("a|b|x") is None
    store.add(Prompt((1,), text="z"), Answer([5], "d"))
    assert store.find_in_chat("zx|") is None


@pytest.mark.parametrize(
    ("generated", "sent", "same"),
    [
        ('{"a": 1}', ' {"a":1}\n', True),
        ('{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"name": "f", "arguments": {}}', '{"name":"f","arguments":{},"id":"x"}', True),
        ('{"name": "f", "id": "x"}', '{"name": "f", "id": "y"}', False),
        ('{"name": "f"}', '{"name": "f", "id": "y"}', False),
        ("[T] a [T]b", "[T]a[T] b", True),
        ("[T] a b", "[T] a  b", False),
        ("[T] a", "a", False),
        ("a", "[T] a", False),
    ],
)
def test_what_is_the_same_answer(generated, sent, same):
    store = AnswerStore({9: "|"}, ["[T]"])
    store.add(Prompt((1,), text="p"), Answer([5], generated))
    assert (store.find_in_chat(f"p{sent}|") is not None) == same


def test_json_that_cannot_be_read_is_no_match():
    store = AnswerStore({9: "|"}, [])
    deep = "[" * 100_000
    store.add(Prompt((1,), text="a"), Answer([5], deep))
    assert store.find_in_chat(f"a{deep} [|") is None
    assert store.find_in_chat(f"a {deep}|") is not None


def test_threads_remember_while_others_render():
    tokenizer = make_tokenizer()
    prompt = tokenizer.render_chat([user("Hi")])

    def turn(number: int) -> bool:
        text = json.dumps(number)
        generated = letters(tokenizer, text)
        tokenizer.remember(prompt, generated, assistant(text))
        later = tokenizer.render_chat([user("Hi"), assistant(text), user("Why?")])
        return starts_with(later, prompt.token_ids, generated)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(100)))
