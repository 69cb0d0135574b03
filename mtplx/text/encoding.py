"""A text, its tokens, and which token starts at which character.

Owns the arithmetic between the two. A prompt may begin with tokens that are known from
an earlier answer (``answers``) and need not be what the tokenizer would make of the text;
what follows them is tokenized here. Pure; any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# What stands before a text to see how it is tokenized inside a longer one. SentencePiece
# has a token of its own for it, which merges with nothing.
_BEFORE = "\n"


@dataclass(frozen=True)
class Encoding:
    """A text and its tokens.

    Attributes:
        token_ids: One for each token.
        offsets: Half-open character range of each token; None from a tokenizer that
            does not tell.
    """

    token_ids: list[int]
    offsets: list[tuple[int, int]] | None


Encode = Callable[[str], Encoding]


class Boundary(NamedTuple):
    """A character of a text and the token that starts there."""

    char: int
    token: int


@dataclass(frozen=True)
class Kept:
    """Known tokens that a text begins with.

    Attributes:
        token_ids: The tokens.
        char: Where the text goes on after them.
        rest: The last characters before ``char`` that the tokens leave out; they are
            tokenized with what follows.
        boundaries: Characters before ``char`` and the tokens that start there, as far
            as they are known.
    """

    token_ids: Sequence[int] = ()
    char: int = 0
    rest: str = ""
    boundaries: Mapping[int, int] = field(default_factory=dict)


class EncodedText:
    """A text whose first tokens may be kept ones.

    Attributes:
        text: The text.
        token_ids: Of all of it.
        start: Where the part begins that was tokenized here.
    """

    def __init__(self, text: str, encode: Encode, kept: Kept | None = None) -> None:
        self.text = text
        self._encode = encode
        self._kept = kept or Kept()
        self._tail = self._encode_tail(text)
        self.token_ids: list[int] = [*self._kept.token_ids, *self._tail.token_ids]
        self.start = Boundary(self._kept.char, len(self._kept.token_ids))

    def token_at(self, char: int) -> int | None:
        """Return the index of the token that starts at ``text[char]``, None if none does
        for certain."""
        if char >= self.start.char:
            return self._tail_token_at(char)
        if (known := self._kept.boundaries.get(char)) is not None:
            return known
        return self._index_after(self._encode(self.text[:char]).token_ids, 0)

    def tail_ids(self, text: str) -> list[int]:
        """Return the tokens after ``start`` of another text that is the same before."""
        return self._encode_tail(text).token_ids

    def _encode_tail(self, text: str) -> Encoding:
        if not self._kept.token_ids:
            return self._encode(text)
        return _encode_inside(self._kept.rest + text[self._kept.char :], self._encode)

    def _tail_token_at(self, char: int) -> int | None:
        start, offsets = self.start.token, self._tail.offsets
        if offsets is None:
            return self._index_after(self.tail_ids(self.text[:char]), start)
        local = char - self._kept.char + len(self._kept.rest)
        index = bisect_left(offsets, local, key=lambda offset: offset[0])
        if index == len(offsets) or offsets[index][0] != local:
            return None
        # Tokens that are bytes of one character share its offsets, and the first may
        # bring more characters with it: none of them starts at a boundary.
        whole = index == 0 or offsets[index - 1][1] <= local
        return start + index if whole else None

    def _index_after(self, head: list[int], start: int) -> int | None:
        end = start + len(head)
        return end if self.token_ids[start:end] == head else None


def _encode_inside(text: str, encode: Encode) -> Encoding:
    """Tokenize a text that others stand before.

    Some tokenizers write a space before every text. Where this one does, its tokens are
    taken from a text in which something stands before it.
    """
    before = encode(_BEFORE).token_ids
    if encode(_BEFORE + "x").token_ids == before + encode("x").token_ids:
        return encode(text)
    encoding = encode(_BEFORE + text)
    if encoding.token_ids[: len(before)] != before:
        return encode(text)
    offsets = encoding.offsets
    if offsets is not None:
        shift = len(_BEFORE)
        offsets = [(start - shift, end - shift) for start, end in offsets[len(before) :]]
    return Encoding(encoding.token_ids[len(before) :], offsets)
