"""How likely each token was, in the two shapes that OpenAI has for it.

A completion tells of every token that was sampled, the end token included, so that they
can be counted; a chat of those that made its text. Pure; runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from typing_extensions import TypedDict

from mtplx.server.interfaces import PromptRenderer
from mtplx.types import TokenLogprob

# JSON has no infinity. What a grammar or a filter ruled out has this, as with OpenAI.
_LEAST = -9999.0


class TopLogprob(TypedDict):
    """A token that could have stood in this place."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TopLogprob):
    """A token of the answer, and the likely ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Logprobs of a chat. ``content`` has those of the text, not of reasoning or calls."""

    content: list[ChatTokenLogprob]
    refusal: None


class TextLogprobs(TypedDict):
    """Logprobs of a completion: lists of one length. A ``text_offset`` is the character
    of the choice's whole text at which the token begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(
    tokenizer: PromptRenderer, scored: Iterable[TokenLogprob]
) -> ChatLogprobs:
    """Return the shape for these tokens of a chat's text."""

    def shape(token_id: int, logprob: float) -> TopLogprob:
        return {
            "token": tokenizer.token_text(token_id),
            "bytes": list(tokenizer.token_bytes(token_id)),
            "logprob": max(logprob, _LEAST),
        }

    content: list[ChatTokenLogprob] = [
        {
            **shape(each.token_id, each.logprob),
            "top_logprobs": [shape(*other) for other in each.top],
        }
        for each in scored
    ]
    return {"content": content, "refusal": None}


class TextScores:
    """Spells the tokens of one completion, which may come in several pieces."""

    def __init__(self, tokenizer: PromptRenderer) -> None:
        self._tokenizer = tokenizer
        self._chars = 0
        self._unfinished = b""

    def spell(
        self,
        token_ids: Sequence[int],
        scored: Sequence[TokenLogprob | None],
        prompt: str | None = None,
    ) -> TextLogprobs:
        """Return the shape for the next tokens.

        Args:
            token_ids: The tokens.
            scored: One for each; None where nothing is known of it.
            prompt: The text that they are the tokens of, where it comes first. It may
                lack what its tokenizer adds: a begin token, a space.
        """
        shape = merged(())
        for token_id, each in zip(token_ids, scored, strict=True):
            name = self._name(token_id)
            shape["tokens"].append(name)
            shape["text_offset"].append(self._offset(token_id, prompt))
            if each is None:
                shape["token_logprobs"].append(None)
                shape["top_logprobs"].append(None)
                continue
            logprob = max(each.logprob, _LEAST)
            shape["token_logprobs"].append(logprob)
            others = {self._name(other): max(p, _LEAST) for other, p in each.top}
            shape["top_logprobs"].append({name: logprob} | others)
        return shape

    def _name(self, token_id: int) -> str:
        """Part of a character has no text; as with OpenAI, its bytes are written out, so
        that two such tokens have two names."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _offset(self, token_id: int, prompt: str | None) -> int:
        offset = self._chars
        raw = self._unfinished + self._tokenizer.token_bytes(token_id)
        whole = raw.decode(errors="ignore")
        self._unfinished = raw[len(whole.encode()) :]
        if prompt is not None and not prompt.startswith(whole, offset):
            whole = whole.removeprefix(" ")
            whole = whole if prompt.startswith(whole, offset) else ""
        self._chars += len(whole)
        return offset


def merged(pieces: Iterable[TextLogprobs]) -> TextLogprobs:
    """Return the logprobs of a whole text from those of its pieces."""
    whole: TextLogprobs = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for piece in pieces:
        whole["tokens"] += piece["tokens"]
        whole["token_logprobs"] += piece["token_logprobs"]
        whole["top_logprobs"] += piece["top_logprobs"]
        whole["text_offset"] += piece["text_offset"]
    return whole
