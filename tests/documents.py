"""The documents, and what is to be found in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from mtplx.cli.main import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Said:
    """Something that a document says, and where."""

    document: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def read(name: str) -> str:
    """Return a document's text."""
    return (ROOT / name).read_text("utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the blocks of code in a language."""
    return [code for found, code in _FENCE.findall(text) if found == language]


def links() -> list[Said]:
    """Return all links that lead to files."""
    found = []
    for path in DOCUMENTS:
        text = _FENCE.sub("", path.read_text("utf-8"))
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            found.append(Said(_name(path), link))
    return found


def anchors(text: str) -> set[str]:
    """Return where links into a document may lead, as GitHub names its headings."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def code() -> list[Said]:
    """Return what stands in backquotes, and the lines of shell blocks."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text("utf-8")
        lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
        pieces = [piece for line in lines for piece in re.split(r" && | \| ", line)]
        pieces += re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))
        found += [Said(_name(path), piece) for piece in pieces]
    return found


def mtplx_commands() -> list[Said]:
    """Return the command lines of ours."""
    return [said for said in code() if said.text.startswith("mtplx ")]


def problem_of(command: str) -> str | None:
    """Return what the command line makes of a command, None where it takes it.

    Nothing is run, and what is missing is not asked for: a text often names a command
    without what follows it.
    """
    words = [word for word in shlex.split(command)[1:] if word != "..."]
    result = CliRunner().invoke(app, [*words, "--help"])
    return result.output if result.exit_code else None


def options() -> set[str]:
    """Return the options of all commands."""

    def of(command: Any) -> set[str]:
        own = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        return own.union(*map(of, getattr(command, "commands", {}).values()))

    return of(typer.main.get_command(app))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))
