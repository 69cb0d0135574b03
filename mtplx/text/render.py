"""Messages to a prompt: token ids, the edges in them, and its stable prefix.

Decides where state is worth keeping. A chat template is a program, and it does not say
which part of its output belongs to which message; so boundaries are found by rendering
other conversations (the first messages only, the next turn) and comparing. What a
template does not reveal this way is no boundary, never a guess. Leaves the tokenizer to
``tokenizer``. Pure; any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from mtplx.errors import InvalidRequestError
from mtplx.types import Prompt

Message = Mapping[str, Any]
Template = Callable[[Sequence[Message], bool], str]
"""``template(messages, generation_header) -> text``; raises whatever it likes."""

_T = TypeVar("_T")

# Every edge costs one more rendering of nearly the whole conversation. The ends of older
# messages were edges of the turns that came before; a new turn resumes at, or is edited
# in, the last few.
_RECENT_MESSAGES = 4

# Two texts that differ in the first character; the second makes a newline before it part
# of a longer token (one newline more would not, in GPT-2's way of splitting). What both
# share with a prompt, any text in their place shares.
_PROBES = ("x", "\n\n0")


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


class _Boundary(NamedTuple):
    char: int
    token: int


def render_chat(messages: Sequence[Message], template: Template, encode: Encode) -> Prompt:
    """Render a conversation that the model is to continue.

    Edges are the end of the system block, the ends of the last messages and the start
    of the generation header.

    Raises:
        InvalidRequestError: The template refuses the messages, or nothing is left of
            them.
    """
    try:
        text = template(messages, True)
    except Exception as error:
        # The template is the model's own code and these are the user's messages: there
        # is no list of what it may raise (jinja's errors, TypeError, KeyError, ...).
        raise InvalidRequestError(
            f"The model's chat template refuses these messages: {error}. "
            "Send roles and an order of messages that the model was made for.",
            param="messages",
        ) from error
    encoding = encode(text)
    if not encoding.token_ids:
        raise InvalidRequestError(
            "The messages render to an empty prompt. Send at least one message with text.",
            param="messages",
        )
    chars = _boundary_chars(messages, text, template)
    edges = [
        _Boundary(char, token)
        for char in sorted(chars)
        if (token := _token_at(char, text, encoding, encode)) is not None
        and 0 < token < len(encoding.token_ids)
    ]
    return Prompt(
        token_ids=tuple(encoding.token_ids),
        edges=tuple(edge.token for edge in edges),
        stable_prefix_len=_stable_prefix_len(
            messages, text, encoding, edges, template, encode
        ),
    )


def _boundary_chars(messages: Sequence[Message], text: str, template: Template) -> set[int]:
    """Indices in ``text`` where the system block or a message ends."""
    system = 0
    while system < len(messages) and messages[system].get("role") in (
        "system",
        "developer",
    ):
        system += 1
    first_recent = max(system + 1, len(messages) - _RECENT_MESSAGES + 1)
    chars = {
        len(part)
        for count in range(first_recent, len(messages) + 1)
        if (part := _try(template, messages[:count])) and text.startswith(part)
    }
    if system:
        part = _try(template, messages[:system])
        content = str(messages[system - 1].get("content") or "").strip()
        if content in part and text.startswith(part):
            chars.add(len(part))
        else:
            # Many templates want a user message, or write the system text into the
            # first one: then the block ends where two different questions part.
            parts = [
                _try(template, [*messages[:system], {"role": "user", "content": probe}])
                for probe in _PROBES
            ]
            if all(parts):
                chars.add(min(_common_len(text, part) for part in parts))
    return chars


def _stable_prefix_len(
    messages: Sequence[Message],
    text: str,
    encoding: Encoding,
    edges: Sequence[_Boundary],
    template: Template,
    encode: Encode,
) -> int:
    """Tokens that the prompt shares with the next turn, whatever the answer is."""
    next_texts = [
        _try(
            template,
            [
                *messages,
                {"role": "assistant", "content": probe},
                {"role": "user", "content": "x"},
            ],
        )
        for probe in _PROBES
    ]
    if not all(next_texts):
        return 0
    common_chars = min(_common_len(text, next_text) for next_text in next_texts)
    # The tokens before the last shared edge need no second and third encoding, unless
    # this tokenizer reads a text differently when its beginning is cut off.
    start = max((e for e in edges if e.char < common_chars), default=_Boundary(0, 0))
    rest = encoding.token_ids[start.token :]
    if start.token and encode(text[start.char :]).token_ids != rest:
        start, rest = _Boundary(0, 0), encoding.token_ids
    return start.token + min(
        _common_len(rest, encode(next_text[start.char :]).token_ids)
        for next_text in next_texts
    )


def _try(template: Template, messages: Sequence[Message]) -> str:
    """Render without a generation header; empty when the template refuses."""
    try:
        return template(messages, False)
    except Exception:
        # Refusing a conversation that nobody sent is no error: see ``render_chat``.
        return ""


def _token_at(char: int, text: str, encoding: Encoding, encode: Encode) -> int | None:
    """Index of the token that starts at ``text[char]``, None if none does."""
    if encoding.offsets is None:
        head = encode(text[:char]).token_ids
        return len(head) if encoding.token_ids[: len(head)] == head else None
    index = bisect_left(encoding.offsets, char, key=lambda offset: offset[0])
    if index == len(encoding.offsets) or encoding.offsets[index][0] != char:
        return None
    # Tokens that are bytes of one character share its offsets, and the first may bring
    # more characters with it: none of them starts at a boundary.
    return index if index == 0 or encoding.offsets[index - 1][1] <= char else None


def _common_len(left: Sequence[_T], right: Sequence[_T]) -> int:
    """Length of the longest common prefix, by comparing ever smaller slices."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
