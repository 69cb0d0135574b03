"""Where tokens begin in the text that they make."""

from __future__ import annotations

import pytest

from mtplx.server.logprobs import TextScores
from mtplx.types import TokenLogprob
from tests.server.fakes import FakeTokenizer, word_id

NOTHING = float("-inf")


@pytest.mark.parametrize(
    ("words", "text", "offsets"),
    [
        (["What", " is"], "What is", [0, 4]),
        (["<s>", "What", " is"], "What is", [0, 0, 4]),
        (["<s>", " What", " is"], "What is", [0, 0, 4]),
        (["<s>", "What"], "<s>What", [0, 3]),
    ],
)
def test_a_prompt_may_lack_what_its_tokenizer_adds(
    words: list[str], text: str, offsets: list[int]
) -> None:
    token_ids = [word_id(word) for word in words]
    shape = TextScores(FakeTokenizer()).spell(token_ids, [None] * len(words), text)
    assert shape["text_offset"] == offsets
    assert shape["tokens"] == words


def test_offsets_go_on_from_piece_to_piece() -> None:
    scores = TextScores(FakeTokenizer())
    first, *rest = "é!".encode()
    pieces = [scores.spell([each], [TokenLogprob(each, -1.0)]) for each in (first, *rest)]
    assert [piece["text_offset"] for piece in pieces] == [[0], [0], [1]]


def test_json_has_no_infinity() -> None:
    shape = TextScores(FakeTokenizer()).spell([65], [TokenLogprob(65, NOTHING)])
    assert shape["token_logprobs"] == [-9999.0]
    assert shape["top_logprobs"] == [{"A": -9999.0}]
