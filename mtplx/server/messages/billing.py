"""The part of a system prompt that changes with every request and says nothing.

Claude Code begins its system prompt with a line such as

    x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=5a0c1;

whose `cch` is a check value of the request, made for the provider's accounting. Left as
it is, no two prompts of one conversation begin alike and none is ever restored. This file
decides what is taken for that value: hexadecimal digits after `cch=`, on a line with that
name, at the very start of a system block. It is set to zeros; nothing else is touched.
Pure; any thread.
"""

from __future__ import annotations

import re
from typing import TypeVar

from mtplx.server.messages.body import CountTokensBody

Body = TypeVar("Body", bound=CountTokensBody)

_CHECK_VALUE = re.compile(
    r"(?P<before>x-anthropic-billing-header:(?:[^\n]*[; ])?cch=)[0-9a-fA-F]+"
    r"(?=[; \n]|$)"
)
# What Claude Code itself has there before it computes the value.
_ZEROS = "00000"


def without_check_value(text: str) -> str:
    """Return a system block with the check value of its billing line set to zeros."""
    match = _CHECK_VALUE.match(text)
    if match is None:
        return text
    return match["before"] + _ZEROS + text[match.end() :]


def without_check_values(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return ``body`` with these values set to zeros, and the paths of the blocks that
    had one."""
    texts = [without_check_value(block.text) for block in body.system]
    changed = tuple(
        f"system[{index}]"
        for index, (text, block) in enumerate(zip(texts, body.system, strict=True))
        if text != block.text
    )
    system = [
        block.model_copy(update={"text": text})
        for text, block in zip(texts, body.system, strict=True)
    ]
    return body.model_copy(update={"system": system}), changed
