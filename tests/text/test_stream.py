"""Text comes out of a stream early, complete, and once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.text.stream import TextStream

from .tokenizers_factory import make_tokenizer

BYTE_LEVEL = make_tokenizer("byte_level")
BYTE_FALLBACK = make_tokenizer("byte_fallback")
CHAR = make_tokenizer("char")
ALL = pytest.mark.parametrize(
    "tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, CHAR], ids=["byte_level", "fallback", "char"]
)


def play(stream: TextStream, token_ids: list[int]) -> str:
    return "".join(stream.push(token_id) for token_id in token_ids) + stream.finish()


def ids_of(vocab_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, vocab_size - 1), max_size=40)


@given(ids_of(BYTE_LEVEL.vocab_size))
def test_any_byte_level_tokens_stream_to_what_decodes_at_once(token_ids):
    assert play(BYTE_LEVEL.text_stream(()), token_ids) == BYTE_LEVEL.decode(token_ids)


@given(ids_of(BYTE_LEVEL.vocab_size), ids_of(BYTE_LEVEL.vocab_size))
def test_the_prompt_is_context_only(prompt, token_ids):
    prompt += BYTE_LEVEL.encode("end", add_special_tokens=False)
    assert play(BYTE_LEVEL.text_stream(prompt), token_ids) == BYTE_LEVEL.decode(token_ids)


@given(ids_of(BYTE_FALLBACK.vocab_size))
def test_tokens_that_rewrite_returned_text_raise_nothing(token_ids):
    """A byte-fallback decoder turns a whole run of bytes into U+FFFD when its last byte
    is wrong; ``DecodeStream`` of tokenizers 0.23 raises there."""
    streamed = play(BYTE_FALLBACK.text_stream(()), token_ids)
    whole = BYTE_FALLBACK.decode(token_ids)
    if "\ufffd" not in whole:
        assert streamed == whole
    else:
        assert "\ufffd" in streamed


def test_a_wrong_byte_costs_only_itself():
    """Decoded at once all three bytes would be U+FFFD, the returned character too."""
    _, *accent = BYTE_FALLBACK.encode("é", add_special_tokens=False)
    _, lead, *_ = BYTE_FALLBACK.encode("日", add_special_tokens=False)
    assert BYTE_FALLBACK.decode([*accent, lead]) == "\ufffd" * 3
    stream = BYTE_FALLBACK.text_stream(())
    assert [stream.push(token_id) for token_id in [*accent, lead]] == ["", "é", ""]
    assert stream.finish() == "\ufffd"


texts = st.text(st.sampled_from("the is 日本🙂é\n  a"), min_size=1, max_size=40)


@ALL
@given(text=texts)
def test_text_survives_the_round_trip(tokenizer, text):
    text = "".join(char for char in text if tokenizer is not CHAR or ord(char) < 1024)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert play(tokenizer.text_stream(()), token_ids) == text


@ALL
def test_text_is_returned_as_soon_as_it_is_certain(tokenizer):
    token_ids = tokenizer.encode("the capital", add_special_tokens=False)
    stream = tokenizer.text_stream(())
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert "".join(pieces) == "the capital"
    assert stream.finish() == ""


def test_an_incomplete_character_is_held_and_ends_as_replacement():
    token_ids = BYTE_LEVEL.encode("🌍", add_special_tokens=False)
    assert len(token_ids) > 2
    stream = BYTE_LEVEL.text_stream(())
    assert [stream.push(token_id) for token_id in token_ids[:-1]] == [""] * (
        len(token_ids) - 1
    )
    assert stream.finish() == "\ufffd"


def test_a_space_after_the_prompt_is_kept_where_the_decoder_strips_the_first():
    prompt = BYTE_FALLBACK.encode("the", add_special_tokens=False)
    (the,) = prompt
    assert BYTE_FALLBACK.text_stream(prompt).push(the) == " the"
    assert BYTE_FALLBACK.text_stream(()).push(the) == "the"


@ALL
def test_special_tokens_have_no_text(tokenizer):
    end = min(tokenizer.eos_token_ids)
    token_ids = tokenizer.encode("the", add_special_tokens=False)
    assert play(tokenizer.text_stream(()), [*token_ids, end, *token_ids[-1:]]) == (
        tokenizer.decode([*token_ids, *token_ids[-1:]])
    )


def test_tokens_that_never_become_text_cost_a_bounded_window():
    sizes = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return "\ufffd" * len(token_ids)

    assert play(TextStream(decode, ()), list(range(1000))) == "\ufffd" * 1000
    assert max(sizes) <= 128


def test_a_stop_string_inside_a_token_ends_the_answer_there():
    token_ids = CHAR.encode("The capital of France is Paris.", add_special_tokens=False)
    stream = CHAR.text_stream((), stop=("ari",))
    text = ""
    for token_id in token_ids:
        text += stream.push(token_id)
        if stream.stopped:
            break
    assert stream.stopped
    assert stream.stop_text == "ari"
    assert text + stream.finish() == "The capital of France is P"


def test_finish_returns_what_was_held_for_a_stop_string():
    stream = CHAR.text_stream((), stop=("STOP",))
    assert play(stream, CHAR.encode("no ST", add_special_tokens=False)) == "no ST"
    assert not stream.stopped
    assert stream.stop_text is None


def test_a_stop_string_completed_by_the_last_character_counts():
    end = BYTE_LEVEL.encode("🌍", add_special_tokens=False)[:-1]
    stream = BYTE_LEVEL.text_stream((), stop=("\ufffd",))
    assert play(stream, end) == ""
    assert stream.stopped
