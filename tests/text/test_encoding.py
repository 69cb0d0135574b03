"""Characters and tokens of a text agree, also where its first tokens are kept ones."""

from __future__ import annotations

import pytest

from mtplx.text.encoding import EncodedText, Encoding, Kept


def pairs(text: str) -> Encoding:
    """Tokens of two characters each, from the first on."""
    spans = [(i, min(i + 2, len(text))) for i in range(0, len(text), 2)]
    return Encoding([hash(text[a:b]) for a, b in spans], spans)


def untold(text: str) -> Encoding:
    return Encoding(pairs(text).token_ids, None)


def spaced(text: str) -> Encoding:
    """Characters, with a space before every text."""
    spans = [(max(i - 1, 0), i) for i in range(len(text) + 1)]
    return Encoding([ord(char) for char in " " + text], spans)


ENCODES = pytest.mark.parametrize("encode", [pairs, untold])


@ENCODES
def test_a_token_is_found_only_where_one_starts(encode):
    encoded = EncodedText("abcdef", encode)
    assert [encoded.token_at(char) for char in range(6)] == [0, None, 1, None, 2, None]


@ENCODES
def test_behind_kept_tokens_counting_goes_on(encode):
    kept = Kept([7, 7, 7], char=3, boundaries={1: 2})
    encoded = EncodedText("abcdefg", encode, kept)
    assert encoded.token_ids == [7, 7, 7, *pairs("defg").token_ids]
    assert encoded.start == (3, 3)
    assert [encoded.token_at(char) for char in (1, 2, 3, 4, 5)] == [2, None, 3, None, 4]
    assert encoded.tail_ids("abcdeXY") == pairs("deXY").token_ids


@ENCODES
def test_what_the_kept_tokens_leave_out_is_tokenized_with_what_follows(encode):
    encoded = EncodedText("abcdefg", encode, Kept([7], char=3, rest="c"))
    assert encoded.token_ids == [7, *pairs("cdefg").token_ids]
    assert [encoded.token_at(char) for char in (3, 4, 5, 6)] == [None, 2, None, 3]


def test_before_the_end_of_kept_tokens_only_equal_tokens_tell():
    ids = pairs("abcd").token_ids
    encoded = EncodedText("abcdef", pairs, Kept(ids, char=4))
    assert encoded.token_at(2) == 1
    assert encoded.token_at(1) is None


def test_no_space_is_written_behind_kept_tokens():
    encoded = EncodedText("abc", spaced, Kept([7], char=1))
    assert encoded.token_ids == [7, ord("b"), ord("c")]
    assert [encoded.token_at(char) for char in (1, 2)] == [1, 2]
    assert EncodedText("abc", spaced).token_ids[0] == ord(" ")
