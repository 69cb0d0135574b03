"""Answers whose tokens are kept, for when their text comes back as history.

A model's state belongs to the tokens it generated. The text of an answer, tokenized again,
may give others: it was split differently, it holds broken characters, the client trimmed
it, or wrote the JSON of a call its own way. So the next prompt is the kept prompt, the
kept answer, and only then new tokens.

Decides whether what a text says in the place of an answer *is* that answer: the text must
begin with the whole text of the answer's prompt, and then say all that was generated and
nothing else. Only spaces around markers and at the ends, and how JSON is written, may
differ. So nothing is put into a prompt that its client did not send (reasoning that was
stripped, say), and nothing that the client changed is lost.

Invariant: ``_answers`` is in order of use, oldest first, and within both limits.

Written and read by the server's workers, under a lock.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from mtplx.text.encoding import Kept
from mtplx.types import Prompt

_MAX_ANSWERS = 512
_MAX_CHARS = 16 * 2**20


@dataclass(frozen=True)
class Answer:
    """What was generated for a prompt.

    Attributes:
        token_ids: Without the end token.
        text: What they say, special tokens written out.
        rest: The end of ``text`` that the tokens leave out, since one of them says more
            (a stop string began inside it).
    """

    token_ids: Sequence[int]
    text: str
    rest: str = ""


def answer_as_sent(
    token_ids: Sequence[int], text: str, ends: Sequence[int], message: Mapping[str, Any]
) -> Answer | None:
    """Return the part of what was generated that the client was sent.

    Args:
        token_ids: What was generated, without the end token.
        text: Their text, special tokens written out.
        ends: How much of it is certain after each token.
        message: What was sent. A stop string cuts its content off before the text ends.

    Returns:
        None when no token is left, or the message does not say what was generated.
    """
    end = 0
    for part in (message.get("reasoning_content"), message.get("content")):
        part = (part or "").rstrip()
        start = text.find(part, end)
        if start < 0:
            return None
        end = start + len(part)
    if message.get("tool_calls") or not text[end:].strip():
        return Answer(token_ids, text) if token_ids else None
    # Only the first token that completes the text so far: the next may begin a character
    # that comes after the end.
    covered = max((char for char in ends if char <= end), default=0)
    if not covered:
        return None
    kept = token_ids[: ends.index(covered) + 1]
    return Answer(kept, text[:end], text[covered:end])


class AnswerStore:
    """The answers that were given last.

    Args:
        ends: End tokens, and what they look like in a text.
        markers: What stands between the parts of an answer (reasoning, calls): where it
            occurs, templates set spaces as they like.
        max_answers: Most answers held.
        max_chars: Most characters of prompts and answers held.
    """

    def __init__(
        self,
        ends: Mapping[int, str],
        markers: Iterable[str],
        *,
        max_answers: int = _MAX_ANSWERS,
        max_chars: int = _MAX_CHARS,
    ) -> None:
        self._end_ids = ends
        self._ends = _one_of(ends.values())
        self._markers = _one_of(markers)
        self._max_answers = max_answers
        self._max_chars = max_chars
        self._answers: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._chars = 0
        self._lock = Lock()

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Keep an answer. One that says the same to the same prompt is replaced."""
        entry = _Entry(prompt, answer)
        with self._lock:
            if (old := self._answers.pop(entry.key, None)) is not None:
                self._chars -= old.chars
            self._answers[entry.key] = entry
            self._chars += entry.chars
            while len(self._answers) > self._max_answers or self._chars > self._max_chars:
                _, oldest = self._answers.popitem(last=False)
                self._chars -= oldest.chars

    def find_in_chat(self, text: str) -> Kept | None:
        """Return the longest kept beginning of a conversation's text: a prompt and the
        answer up to the end of its message or, if that is another, the prompt up to its
        last end token."""
        longest = None
        for entry in self._candidates(text):
            if longest is not None and entry.prompt_text != longest.prompt_text:
                break
            longest = longest or entry
            end = self._ends.search(text, len(entry.prompt_text))
            char = end.start() if end else len(text)
            sent = text[len(entry.prompt_text) : char]
            # A text without an end is to be continued: where nothing of the answer
            # stands in it, spaces would be an answer to it, and others its next words.
            if self._same(entry.text, sent) if end else sent == entry.text:
                kept = Kept(entry.token_ids, char, entry.rest, entry.boundaries)
                return self._use(entry, kept)
        return self._head(longest) if longest else None

    def find_in_text(self, text: str) -> Kept | None:
        """Return the longest kept beginning of a plain text, character by character."""
        for entry in self._candidates(text):
            if text.startswith(entry.text, len(entry.prompt_text)):
                char = len(entry.prompt_text) + len(entry.text)
                kept = Kept(entry.token_ids, char - len(entry.rest), "", entry.boundaries)
                return self._use(entry, kept)
        return None

    def check(self) -> None:
        """Assert the invariant."""
        assert self._chars == sum(entry.chars for entry in self._answers.values())
        assert len(self._answers) <= self._max_answers
        assert self._chars <= self._max_chars

    def _candidates(self, text: str) -> list[_Entry]:
        """Entries whose prompt the text begins with, longest first, then latest."""
        with self._lock:
            entries = list(reversed(self._answers.values()))
        matching = [entry for entry in entries if text.startswith(entry.prompt_text)]
        return sorted(matching, key=lambda entry: -len(entry.prompt_text))

    def _head(self, entry: _Entry) -> Kept | None:
        # An end token is found whole in any text, so that what stands before it is
        # tokenized alike whatever comes after.
        tokens = range(entry.boundaries[len(entry.prompt_text)])
        ends = self._end_ids
        last = next((i for i in reversed(tokens) if entry.token_ids[i] in ends), None)
        if last is None:
            return None
        char = entry.prompt_text.rfind(ends[entry.token_ids[last]])
        return self._use(entry, Kept(entry.token_ids[:last], char, "", entry.boundaries))

    def _use(self, entry: _Entry, kept: Kept) -> Kept:
        with self._lock:
            if entry.key in self._answers:
                self._answers.move_to_end(entry.key)
        return kept

    def _same(self, generated: str, sent: str) -> bool:
        if generated == sent:
            return True
        left = [part.strip() for part in self._markers.split(generated)]
        right = [part.strip() for part in self._markers.split(sent)]
        return len(left) == len(right) and all(map(_same_part, left, right))


class _Entry:
    """An answer with its prompt, packed."""

    def __init__(self, prompt: Prompt, answer: Answer) -> None:
        self.prompt_text = prompt.text
        self.text = answer.text
        self.rest = answer.rest
        self.token_ids = array("I", prompt.token_ids) + array("I", answer.token_ids)
        self.boundaries = dict(zip(prompt.edge_chars, prompt.edges, strict=True))
        self.boundaries[len(prompt.text)] = len(prompt.token_ids)

    @property
    def key(self) -> tuple[str, str]:
        return self.prompt_text, self.text

    @property
    def chars(self) -> int:
        return len(self.prompt_text) + len(self.text)


def _one_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the words, which ``split`` returns as parts of their own."""
    longest_first = sorted({word for word in words if word}, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _same_part(generated: str, sent: str) -> bool:
    if generated == sent:
        return True
    if not (generated[:1] in ("{", "[") and sent[:1] in ("{", "[")):
        return False
    try:
        left, right = json.loads(generated), json.loads(sent)
        # As text, since Python has 1 == 1.0 == True.
        return json.dumps(left, sort_keys=True) in (
            json.dumps(right, sort_keys=True),
            json.dumps(_without_ids(right), sort_keys=True),
        )
    except (ValueError, RecursionError):
        return False


def _without_ids(calls: Any) -> Any:
    """Drop the ids of calls, which some templates write: they are the server's, not the
    model's."""
    if isinstance(calls, list):
        return [_without_ids(call) for call in calls]
    if isinstance(calls, dict) and calls.keys() == {"name", "arguments", "id"}:
        return {key: value for key, value in calls.items() if key != "id"}
    return calls
