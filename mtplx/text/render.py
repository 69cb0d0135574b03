"""Messages to a prompt: token ids, the edges in them, and its stable prefix.

Decides where state is worth keeping. A chat template is a program, and it does not say
which part of its output belongs to which message; so boundaries are found by rendering
other conversations (the first messages only, the next turn) and comparing. What a
template does not reveal this way is no boundary, never a guess. Leaves the tokenizer to
``tokenizer``, and the tokens that are known from earlier answers to ``answers``. Pure;
any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from mtplx.errors import InvalidRequestError
from mtplx.text.encoding import Boundary, Encode, EncodedText, Kept
from mtplx.text.tools import Message, speaks_of_tools
from mtplx.types import Prompt

Template = Callable[[Sequence[Message], bool], str]
"""``template(messages, generation_header) -> text``; raises whatever it likes."""

FindKept = Callable[[str], Kept | None]
"""The known tokens that a text begins with, None where there are none."""

_T = TypeVar("_T")

# Every edge costs one more rendering of nearly the whole conversation. The ends of older
# messages were edges of the turns that came before; a new turn resumes at, or is edited
# in, the last few.
_RECENT_MESSAGES = 4

# Two texts that differ in the first character; the second makes a newline before it part
# of a longer token (one newline more would not, in GPT-2's way of splitting). What both
# share with a prompt, any text in their place shares.
_PROBES = ("x", "\n\n0")

_QUESTION: Message = {"role": "user", "content": "x"}
# The shortest call and result that templates accept: some want an id of nine letters.
_CALL_AND_RESULT: tuple[Message, ...] = (
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "callx0000",
                "type": "function",
                "function": {"name": "x", "arguments": {}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "callx0000", "name": "x", "content": "x"},
)


def render_chat(
    messages: Sequence[Message],
    template: Template,
    encode: Encode,
    *,
    find_kept: FindKept | None = None,
    tool_names: Sequence[str] = (),
    continue_final_message: bool = False,
    edge_after: Sequence[int] = (),
) -> Prompt:
    """Render a conversation that the model is to continue.

    Edges are the ends of the system block and of the tools, the ends of the last messages
    and of those asked for, and the start of the generation header.

    Args:
        messages: Arguments of calls as objects.
        template: Knows the tools.
        encode: Text to tokens, without any that the text does not show.
        find_kept: Asked once, for the whole text.
        tool_names: Of the tools that the template writes.
        continue_final_message: The text ends inside the last message, an assistant's.
        edge_after: Indices of messages whose ends are edges too.

    Raises:
        InvalidRequestError: The template refuses the messages, or nothing is left of
            them.
    """
    try:
        text = (
            _open_text(messages, template)
            if continue_final_message
            else template(messages, True)
        )
    except Exception as error:
        # The template is the model's own code and these are the user's messages: there
        # is no list of what it may raise (jinja's errors, TypeError, KeyError, ...).
        raise InvalidRequestError(
            f"The model's chat template refuses these messages: {error}. "
            "Send roles and an order of messages that the model was made for.",
            param="messages",
        ) from error
    encoded = EncodedText(text, encode, find_kept(text) if find_kept else None)
    if not encoded.token_ids:
        raise InvalidRequestError(
            "The messages render to an empty prompt. Send at least one message with text.",
            param="messages",
        )
    counts = _recent_counts(messages) | {index + 1 for index in edge_after}
    if continue_final_message:
        counts.discard(len(messages))
    chars = _message_ends(messages, counts, text, template)
    chars |= _head_ends(messages, tool_names, text, template)
    edges = [
        Boundary(char, token)
        for char in sorted(chars)
        if (token := encoded.token_at(char)) is not None
        and 0 < token < len(encoded.token_ids)
    ]
    next_texts = _next_texts(messages, template, bool(tool_names), continue_final_message)
    return Prompt(
        token_ids=tuple(encoded.token_ids),
        edges=tuple(edge.token for edge in edges),
        stable_prefix_len=_stable_prefix_len(encoded, edges, next_texts, encode),
        text=text,
        edge_chars=tuple(edge.char for edge in edges),
    )


def check_can_continue(messages: Sequence[Message]) -> None:
    """Check that the last message is the beginning of an answer.

    Raises:
        InvalidRequestError: It is another's, or it calls tools.
    """
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise InvalidRequestError(
            "Only an assistant's text can be continued. End the messages with an "
            "assistant message without tool calls.",
            param="messages",
        )


def _open_text(messages: Sequence[Message], template: Template) -> str:
    """Render up to where the content of the last message ends."""
    left, right = (template(_with_more(messages, probe), False) for probe in "xy")
    if left == right:
        raise ValueError("it does not show the last message")
    return left[: _common_len(left, right)]


def _with_more(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with text added to the last one."""
    last = messages[-1]
    return [*messages[:-1], {**last, "content": (last.get("content") or "") + text}]


def _system_len(messages: Sequence[Message]) -> int:
    """How many messages the system block has."""
    roles = [message.get("role") in ("system", "developer") for message in messages]
    return roles.index(False) if False in roles else len(roles)


def _recent_counts(messages: Sequence[Message]) -> set[int]:
    first = max(_system_len(messages) + 1, len(messages) - _RECENT_MESSAGES + 1)
    return set(range(first, len(messages) + 1))


def _message_ends(
    messages: Sequence[Message], counts: set[int], text: str, template: Template
) -> set[int]:
    """Indices in ``text`` where the first so many messages end."""
    return {
        len(part)
        for count in counts
        if (part := _try(template, messages[:count])) and text.startswith(part)
    }


def _head_ends(
    messages: Sequence[Message], tool_names: Sequence[str], text: str, template: Template
) -> set[int]:
    """Indices in ``text`` where the system block and the tools end."""
    system = messages[: _system_len(messages)]
    shown = _try(template, system) if system else ""
    content = str(system[-1].get("content") or "").strip() if system else ""
    if not text.startswith(shown) or content not in shown:
        shown = ""
    chars = {len(shown)} if shown else set()
    if (system and not shown) or any(f'"{name}"' not in shown for name in tool_names):
        # Many templates want a user message, or write the system text or the tools into
        # the first one: then they end where two different questions part.
        questions = [{"role": "user", "content": probe} for probe in _PROBES]
        parts = [_try(template, [*system, question]) for question in questions]
        if all(parts):
            chars.add(min(_common_len(text, part) for part in parts))
    return chars


def _next_texts(
    messages: Sequence[Message], template: Template, has_tools: bool, is_open: bool
) -> list[str]:
    """Render what the next turn may be; empty when the template refuses them."""
    replies = [
        _with_more(messages, probe)
        if is_open
        else [*messages, {"role": "assistant", "content": probe}]
        for probe in _PROBES
    ]
    texts = [_try(template, [*reply, _QUESTION]) for reply in replies]
    if not all(texts):
        return []
    # Reasoning that a template drops at the next question stays while tools are called,
    # so a call keeps less, or more, than an answer does.
    if (has_tools or speaks_of_tools(messages)) and not is_open:
        texts += filter(None, [_try(template, [*messages, *_CALL_AND_RESULT])])
    return texts


def _stable_prefix_len(
    encoded: EncodedText,
    edges: Sequence[Boundary],
    next_texts: Sequence[str],
    encode: Encode,
) -> int:
    """Tokens that the prompt shares with the next turn, whatever the answer is."""
    if not next_texts:
        return 0
    common_chars = min(_common_len(encoded.text, next_text) for next_text in next_texts)
    # The tokens before the last shared edge need no second and third encoding, unless
    # this tokenizer reads a text differently when its beginning is cut off.
    start = max((e for e in edges if e.char < common_chars), default=Boundary(0, 0))
    rest = encoded.token_ids[start.token :]
    if common_chars < encoded.start.char or (
        start.char > encoded.start.char
        and encode(encoded.text[start.char :]).token_ids == rest
    ):
        tails = [encode(next_text[start.char :]).token_ids for next_text in next_texts]
    else:
        start = encoded.start
        rest = encoded.token_ids[start.token :]
        tails = [encoded.tail_ids(next_text) for next_text in next_texts]
    return start.token + min(_common_len(rest, tail) for tail in tails)


def _try(template: Template, messages: Sequence[Message]) -> str:
    """Render without a generation header; empty when the template refuses."""
    try:
        return template(messages, False)
    except Exception:
        # Refusing a conversation that nobody sent is no error: see ``render_chat``.
        return ""


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
