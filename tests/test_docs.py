"""What the documents in ``docs`` say is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mtplx.config import Settings
from mtplx.server.field_docs import with_tables
from mtplx.server.field_rows import field_rows

FIELDS = (Path(__file__).parent.parent / "docs" / "api-fields.md").read_text("utf-8")
COMMAND = "python -m mtplx.server.field_docs docs/api-fields.md"


def test_the_tables_are_up_to_date():
    assert with_tables(FIELDS) == FIELDS, f"Run `{COMMAND}`."


def test_a_stale_table_would_be_seen():
    [line] = re.findall(r"\| `suffix` \| refused \|.*\n", FIELDS)
    assert with_tables(FIELDS.replace(line, "")) == FIELDS
    assert with_tables(FIELDS.replace(line, line.replace("refused", "honoured"))) == FIELDS


def test_every_field_is_told():
    for row in field_rows():
        assert f"| `{row.field}` | {row.state} |" in FIELDS


def test_a_document_without_a_place_is_refused():
    with pytest.raises(ValueError, match="fields of /v1/completions"):
        with_tables(FIELDS.replace("<!-- fields of /v1/completions -->", ""))


def test_settings_it_names_exist():
    named = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)\b", FIELDS)}
    assert named
    assert named <= set(Settings.model_fields)
