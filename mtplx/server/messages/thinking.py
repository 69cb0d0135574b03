"""Thinking on the wire: its signature, and how it comes back.

A local model has no secret to sign with, and every thinking block is accepted, whoever
made it. The signature that Anthropic's shape asks for is still of use: for a client that
wants no thinking to be shown it carries the text itself, so that the next turn has it
back. Otherwise it is a short digest. Pure; any thread.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

from mtplx.server.messages.body import ThinkingBlock

_DIGEST = "mtplx-digest-"
_TEXT = "mtplx-text-"


def signature(thinking: str, *, shown: bool) -> str:
    """Return the signature of a thinking block whose text is shown, or is not."""
    raw = thinking.encode("utf-8", errors="replace")
    if shown:
        return _DIGEST + hashlib.sha256(raw).hexdigest()[:16]
    return _TEXT + base64.b64encode(raw).decode()


def thinking_text(block: ThinkingBlock) -> str:
    """Return what was thought, out of the signature where it was not shown."""
    if block.thinking or not block.signature.startswith(_TEXT):
        return block.thinking
    try:
        return base64.b64decode(block.signature[len(_TEXT) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""  # As for other servers' signatures: nothing can be read in it.
