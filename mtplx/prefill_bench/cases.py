"""What is measured, by the names that llama-bench gives it.

``pp512`` reads a prompt of 512 tokens; ``pp512@d8192`` reads 512 tokens behind 8,192 that
are known already. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from mtplx.errors import ConfigError

Mode = Literal["cold", "memory", "disk", "contended"]
"""Nothing of the prompt is known; what is before it is restored from memory, or from disk
after a restart; or it is read while streams decode, known from memory where there is
something before it."""

_CASE = re.compile(r"pp([1-9]\d*)(k?)(?:@d([1-9]\d*)(k?))?", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A prompt.

    Attributes:
        new_tokens: To be computed.
        depth_tokens: Known before.
    """

    new_tokens: int
    depth_tokens: int = 0

    def __str__(self) -> str:
        depth = f"@d{self.depth_tokens}" if self.depth_tokens else ""
        return f"pp{self.new_tokens}{depth}"

    @property
    def prompt_tokens(self) -> int:
        """Its length."""
        return self.depth_tokens + self.new_tokens

    def modes(self, wanted: Sequence[Mode]) -> list[Mode]:
        """Return those of ``wanted`` that it can be measured in."""
        fitting = ("memory", "disk") if self.depth_tokens else ("cold",)
        return [mode for mode in wanted if mode in (*fitting, "contended")]


def parse_cases(text: str) -> list[Case]:
    """Return the cases in a text such as ``pp512,pp1k,pp512@d8k``; k is 1024.

    Raises:
        ConfigError: One of them is none.
    """
    cases = []
    for word in text.split(","):
        found = _CASE.fullmatch(word.strip())
        if found is None:
            raise ConfigError(
                f"--cases cannot contain {word!r}. Write pp512 for a prompt of 512 tokens, "
                "pp512@d8192 for 512 behind 8192 that are known; k is 1024."
            )
        new, new_k, depth, depth_k = found.groups()
        cases.append(Case(_number(new, new_k), _number(depth or "0", depth_k or "")))
    return cases


def parse_modes(text: str) -> list[Mode]:
    """Return the modes in a text such as ``cold,memory``.

    Raises:
        ConfigError: One of them is none.
    """
    known: tuple[Mode, ...] = get_args(Mode)
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"--modes cannot contain {word!r}; use some of {', '.join(known)}."
            )
    return [mode for mode in known if mode in words]


def _number(digits: str, k: str) -> int:
    return int(digits) * (1024 if k else 1)
