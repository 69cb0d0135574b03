"""Token ids to text, one token at a time.

Decides which text of an answer is certain after each token. Owns the window of tokens
that are decoded together; leaves stop strings to ``stop`` and end tokens to the engine.
Used on the engine thread, one stream per request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mtplx.text.stop import StopMatcher

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
# Enough of the prompt to tell a decoder that strips the first space of a text that the
# answer is not the beginning of one.
_PRIMING_TOKENS = 6
# A character needs at most 4 tokens, so only bytes that never become text get here.
_MAX_PENDING_TOKENS = 64


class TextStream:
    """The text of one answer.

    Args:
        decode: Token ids to text, as one text; what has no text (end tokens, say) is
            left out.
        prompt_token_ids: The prompt the answer continues; its end is the context of the
            first token and is never returned.
        stop: Strings that end the answer; they are not part of it.
    """

    def __init__(
        self, decode: Decode, prompt_token_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._decoder = _WindowDecoder(decode, prompt_token_ids[-_PRIMING_TOKENS:])
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing more will be returned."""
        return self._matcher.stopped

    @property
    def stop_text(self) -> str | None:
        """The stop string that was found; None where none was."""
        return self._matcher.stop_text

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now certain, maybe none."""
        return self._matcher.push(self._decoder.push(token_id))

    def finish(self) -> str:
        """End the answer and return the rest; an unfinished character is U+FFFD."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.flush()


class _WindowDecoder:
    """Decodes a sliding window: tokens already returned, then tokens still pending.

    ``tokenizers.decoders.DecodeStream`` works like this too, but raises for good as soon
    as a token changes text that was already returned. Byte-fallback vocabularies do that
    (one wrong byte turns its whole run into U+FFFD), and sampling at a high temperature
    reaches it. Here such a token costs a U+FFFD. Any decode function will do, so fast
    and slow tokenizers behave alike.

    Invariant: ``_context_text`` is the decoded ``_window[:_context_tokens]``, and all
    of it has been returned (or belongs to the prompt).
    """

    def __init__(self, decode: Decode, context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._context_tokens = len(self._window)
        self._context_text = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        overdue = len(self._window) - self._context_tokens >= _MAX_PENDING_TOKENS
        if text.endswith(_REPLACEMENT) and not overdue:
            return ""
        new = self._after_context(text)
        if new or overdue:
            self._window = self._window[self._context_tokens :]
            self._context_tokens = len(self._window)
            self._context_text = self._decode(self._window)
        return new

    def finish(self) -> str:
        if len(self._window) == self._context_tokens:
            return ""
        text = self._after_context(self._decode(self._window))
        self._window, self._context_tokens, self._context_text = [], 0, ""
        return text

    def _after_context(self, text: str) -> str:
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._window[self._context_tokens :])
