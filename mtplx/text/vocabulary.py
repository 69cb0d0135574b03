"""What single tokens stand for.

Decides the bytes of one token, from how the tokenizer's decoder joins them: byte-level
vocabularies write each byte as a letter of their own, SentencePiece's write spaces as
U+2581 and odd bytes as ``<0x..>``. Pure; any thread.
"""

from __future__ import annotations

import json
import re
from functools import cache, cached_property
from threading import Lock
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Vocabulary:
    """The tokens of one tokenizer.

    Args:
        wrapper: As for ``Tokenizer``.
        lock: Held while the wrapper is used.

    Attributes:
        special: Tokens that no text shows, written out.
    """

    def __init__(self, wrapper: Any, lock: Lock) -> None:
        self._wrapper = wrapper
        self._lock = lock
        self._size = len(wrapper)
        self.special: dict[int, str] = {
            token_id: str(token)
            for token_id, token in wrapper.added_tokens_decoder.items()
            if token.special
        }

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for inside a text, none for an unknown id."""
        if token_id in self.special:
            return self.special[token_id].encode()
        if not 0 <= token_id < self._size:
            return b""
        with self._lock:
            token = self._wrapper.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoders:
            letters = _byte_of_letter()
            # As its decoder does: a token with any other letter is one as it is.
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return str(token).encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token).replace(_SPACE, " ").encode()

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """Kinds of the parts of the decoder."""
        backend = getattr(self._wrapper, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return frozenset()
        state = json.loads(decoder.__getstate__())
        return frozenset(part["type"] for part in state.get("decoders", [state]))


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level vocabularies show printable bytes as the Latin-1 letters they are, and
    the others, in order, as the letters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
