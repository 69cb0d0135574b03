"""The tables in ``docs/api-fields.md``, from ``field_rows.py``.

The text around them is written by hand. A table stands behind a comment with the path of
its API and ends at the next empty line; this file decides what it looks like. To bring
the tables up to date:

    python -m mtplx.server.field_docs docs/api-fields.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from mtplx.server.field_rows import BODIES, FieldRow, field_rows

# One API's rows are those of another, but for these.
_LIKE = {"/v1/messages/count_tokens": "/v1/messages"}


def with_tables(text: str) -> str:
    """Return the document with its tables as they are to be.

    Raises:
        ValueError: An API has no place for its table.
    """
    for api in BODIES:
        mark = f"<!-- fields of {api} -->\n"
        before, found, after = text.partition(mark)
        if not found:
            raise ValueError(f"The document has no line {mark!r}.")
        rest = re.sub(r"\A\n*(\|.*\n)*", "", after)
        text = f"{before}{mark}\n{_table(_rows(api))}{rest}"
    return text


def _rows(api: str) -> list[FieldRow]:
    rows = [row for row in field_rows() if row.api == api]
    if api not in _LIKE:
        return rows
    known = {row[1:] for row in field_rows() if row.api == _LIKE[api]}
    return [row for row in rows if row[1:] not in known]


def _table(rows: Iterable[FieldRow]) -> str:
    lines = ["| field | | |", "| --- | --- | --- |"]
    for row in rows:
        reason = row.reason.replace("|", "\\|")
        lines.append(f"| `{row.field}` | {row.state} | {reason} |")
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_tables(document.read_text("utf-8")), "utf-8")
