"""Stop strings in a stream of text.

Decides how much of an answer may be shown while a stop string could still complete.
The answer is what stands before the earliest place where any stop string begins,
exactly as if the whole text had been searched at once, however it was cut into pieces.
Knows nothing of tokens. One matcher per text; used on the engine thread for stop
strings, and wherever an answer is told apart for the markers in it.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches a text for stop strings; the cost is linear in its length.

    Invariant: what was returned plus what is held is the text seen so far, and no stop
    string that ends inside or after the held part can begin before it.

    Args:
        stops: The stop strings; an empty one matches nothing.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops if stop]
        self._held = ""
        self._held_start = 0
        self._seen = 0
        self._match: tuple[int, str] | None = None
        self._stop_text: str | None = None
        self._rest = ""

    @property
    def stopped(self) -> bool:
        """A stop string was found; nothing more will be returned."""
        return self._stop_text is not None

    @property
    def stop_text(self) -> str | None:
        """The stop string that was found. Of two that begin at the same place it is the
        one that was complete first."""
        return self._stop_text

    @property
    def rest(self) -> str:
        """What was pushed behind the stop string before it was known to be one."""
        return self._rest

    def push(self, text: str) -> str:
        """Add text and return what is now certainly part of the answer."""
        if self.stopped:
            return ""
        if not self._patterns:
            return text
        self._held += text
        for char in text:
            self._seen += 1
            for pattern in self._patterns:
                if pattern.advance(char):
                    start = self._seen - len(pattern.text)
                    if self._match is None or start < self._match[0]:
                        self._match = start, pattern.text
            # A match counts only when no longer stop string that began before it can
            # still complete: the earliest beginning wins, not the earliest end.
            if self._match is not None and self._open_start() >= self._match[0]:
                return self._stop(*self._match)
        return self._release(self._open_start())

    def flush(self) -> str:
        """End the text and return what is left of the answer.

        May set ``stopped``: a match that waited for a longer one counts now.
        """
        if self.stopped:
            return ""
        if self._match is not None:
            return self._stop(*self._match)
        return self._release(self._seen)

    def _open_start(self) -> int:
        """Where the longest suffix begins that could be the head of a stop string."""
        return self._seen - max(pattern.matched for pattern in self._patterns)

    def _stop(self, start: int, stop_text: str) -> str:
        text = self._release(start)
        self._stop_text = stop_text
        self._rest, self._held = self._held[len(stop_text) :], ""
        return text

    def _release(self, end: int) -> str:
        count = end - self._held_start
        text, self._held = self._held[:count], self._held[count:]
        self._held_start = end
        return text


class _Pattern:
    """One stop string and how much of its head the text now ends with (KMP)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # _fallback[n]: length of the longest proper head of text[:n] that it ends with.
        self._fallback = [0, 0]
        length = 0
        for char in text[1:]:
            length = self._extend(length, char)
            self._fallback.append(length)

    def advance(self, char: str) -> bool:
        """Reads one character; True when the whole stop string ends with it."""
        self.matched = self._extend(self.matched, char)
        if self.matched < len(self.text):
            return False
        # After a match only earlier beginnings matter, and this string has none open.
        self.matched = 0
        return True

    def _extend(self, length: int, char: str) -> int:
        while length and self.text[length] != char:
            length = self._fallback[length]
        return length + 1 if self.text[length] == char else 0
