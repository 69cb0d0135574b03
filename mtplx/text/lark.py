"""Grammars as llguidance reads them, and the pieces that all of them are made of.

Decides how a marker is matched. Where the vocabulary has it as one token, free text
cannot hold that token, so the token ends the text; but a model may also spell a marker
in letters, and ``channels`` takes either. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits

Tokens = Mapping[str, int]
"""Text of tokens that are matched whole, and their ids."""

FREE_TEXT = "TEXT: /(.|\\n)*/"
"""The terminal that ``until`` needs: any text without special tokens."""


def lark_text(lark: str) -> str:
    """Return what llguidance reads for a grammar in Lark."""
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def check(grammar: str) -> tuple[str, list[str]]:
    """Return why llguidance cannot use a grammar, empty if it can, and its warnings."""
    limits = LLParserLimits(verbose_errors=False)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    return (messages[0], []) if failed else ("", messages)


def literal(text: str, tokens: Tokens) -> str:
    """Return the expression for exactly this text."""
    parts = _split(text, tokens)
    return " ".join(
        f"(<[{tokens[part]}]> | {_quoted(part)})" if part in tokens else _quoted(part)
        for part in parts
    )


def until(rule: str, marker: str, tokens: Tokens) -> list[str]:
    """Return rules for any text up to and with ``marker``; the first is ``rule``."""
    lines = [f"{rule}_spelled[lazy]: TEXT {_quoted(marker)}"]
    ends = [f"{rule}_spelled"]
    parts = _split(marker, tokens)
    if parts[0] in tokens:
        ends.append(
            f"TEXT? <[{tokens[parts[0]]}]> {literal(marker[len(parts[0]) :], tokens)}"
        )
    return [f"{rule}: {' | '.join(ends)}", *lines]


def _split(text: str, tokens: Tokens) -> list[str]:
    if not tokens:
        return [text] if text else []
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = "|".join(re.escape(token) for token in longest_first)
    return [part for part in re.split(f"({pattern})", text) if part]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
