"""What the documents say is true: commands, options, links, tables and examples."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from mtplx.cli.clients import CLIENTS
from mtplx.cli.main import app
from mtplx.cli.python_docs import PUBLIC, markdown, reference
from mtplx.config import Settings
from mtplx.metrics import PrefillMetrics, StreamMetrics
from mtplx.scheduler.config import RELATIVE_ITL_TARGET
from mtplx.server.errors import TABLE
from mtplx.server.field_docs import with_tables
from mtplx.server.field_rows import field_rows
from mtplx.server.metrics import Metrics
from tests import documents
from tests.server.conftest import Server
from tests.server.fakes import FakeEngine
from tests.server.small_app import small_app
from tests.server.test_metrics import STATUS, StatusEngine

FIELDS = documents.read("docs/api-fields.md")
COMMAND = "python -m mtplx.server.field_docs docs/api-fields.md"
COMMANDS = documents.mtplx_commands()
LINKS = documents.links()


def rows(text: str, mark: str) -> list[list[str]]:
    """Return the cells of the table behind a comment that begins so."""
    lines = text.partition(f"<!-- {mark}")[2].partition("\n\n")[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]
    assert table, mark
    return table


# -- all of them ----------------------------------------------------------------


@pytest.mark.parametrize("said", LINKS, ids=str)
def test_links_lead_somewhere(said):
    path, _, anchor = said.text.partition("#")
    here = documents.ROOT / said.document
    target = (here.parent / path).resolve() if path else here
    assert target.exists()
    if anchor:
        assert anchor in documents.anchors(target.read_text("utf-8"))


def test_every_document_is_linked_from_the_readme():
    linked = {said.text for said in LINKS if said.document == "README.md"}
    names = {f"docs/{path.name}" for path in (documents.ROOT / "docs").glob("*.md")}
    assert names <= linked


@pytest.mark.parametrize("said", COMMANDS, ids=str)
def test_commands_are_taken(said):
    assert documents.problem_of(said.text) is None


def test_wrong_commands_would_be_seen():
    assert len(COMMANDS) > 40
    for wrong in ("mtplx sevre demo", "mtplx top --nothing", "mtplx cache ls --port"):
        assert documents.problem_of(wrong)


def test_options_exist():
    known, asked = documents.options(), 0
    for said in documents.code():
        # What begins otherwise is another program's command; the benchmarks' page is
        # about the options of its scripts.
        if said.text.startswith("--") and said.document != "benchmarks/README.md":
            asked += 1
            assert said.text.split()[0] in known, str(said)
    assert asked > 50


def test_variables_exist():
    known = {f"MTPLX_{name.upper()}" for name in Settings.model_fields}
    known |= {"MTPLX_CONFIG", "MTPLX_CACHE_DIR", "MTPLX_"}
    for path in documents.DOCUMENTS:
        assert set(re.findall(r"\bMTPLX_[A-Z_]*", path.read_text("utf-8"))) <= known


@pytest.mark.parametrize(
    "said", [s for s in documents.code() if s.text.startswith("python b")], ids=str
)
def test_benchmarks_take_what_is_said_of_them(said):
    command = re.sub(r'"[^"]*"', "", said.text)
    script = (documents.ROOT / command.split()[1]).read_text("utf-8")
    for option in re.findall(r" (--[\w-]+)", command):
        assert f'add_argument("{option}"' in script.replace("(\n        ", "("), option


# -- request fields -------------------------------------------------------------


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


# -- settings, metrics, HTTP, Python --------------------------------------------


def test_the_settings_table_is_the_settings():
    told = [
        (name.strip("`-").lower().replace("-", "_"), default, text)
        for name, default, text in rows(documents.read("docs/settings.md"), "settings")
    ]
    assert told == [
        (name, "" if each.default is None else f"`{each.default}`", each.description)
        for name, each in Settings.model_fields.items()
    ]


@pytest.mark.parametrize(
    "name", [*PrefillMetrics.__dataclass_fields__, *StreamMetrics.__dataclass_fields__]
)
def test_every_metric_of_an_answer_is_explained(name):
    table = documents.read("docs/metrics.md").partition("## In the log")[0]
    assert f"`{name}`" in table


def test_the_names_for_prometheus_are_all_there():
    engine = StatusEngine(STATUS)
    text = Metrics(engine).exposition("")[0].decode()
    engine.close()
    kinds = dict(re.findall(r"^# TYPE (mtplx_\w+) (\w+)$", text, re.MULTILINE))
    served = {name for name in kinds if not name.endswith("_created")}
    page = documents.read("docs/metrics.md").partition("## Prometheus")[2]
    assert set(re.findall(r"^\| `(mtplx_\w+)` \|", page, re.MULTILINE)) == served
    questions = page.rpartition("```text")[2]
    asked = re.findall(r"\b(mtplx_\w+?)(?:_bucket)?(?=[\[ ])", questions)
    assert asked
    assert set(asked) <= served


def test_the_routes_are_all_there():
    engine = FakeEngine()
    document = small_app(engine).openapi()
    engine.close()
    assert rows(documents.read("docs/http-reference.md"), "routes") == [
        [method.upper(), f"`{path}`", operation["description"]]
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]


def test_the_errors_are_all_there():
    told = {
        (int(status), code.strip("`"))
        for status, code, _ in rows(documents.read("docs/http-reference.md"), "errors")
    }
    assert told == {(row.status, row.code) for row in TABLE.values() if row.code}


def test_the_python_reference_is_up_to_date():
    command = "python -m mtplx.cli.python_docs docs/python-reference.md"
    assert documents.read("docs/python-reference.md") == reference(), f"Run `{command}`."


def test_the_python_reference_has_the_public_names():
    text = reference()
    for module, names in PUBLIC.items():
        assert f"\n## `{module}`\n" in text
        for name in names or ():
            assert f"\n### `{name}`\n" in text
    assert "\n#### `Model.decode`\n" in text
    assert "    token_ids: Sequence[int],\n" in text


def test_a_docstring_becomes_markdown():
    docstring = (
        "Say ``it``.\n\nArgs:\n    one: First\n        and on.\n    two: Second.\n\n"
        "Returns:\n    Something\n    long.\n\nThe end."
    )
    assert markdown(docstring) == (
        "Say `it`.\n\n**Args**\n\n- `one`: First\n  and on.\n- `two`: Second.\n\n"
        "**Returns**\n\nSomething\nlong.\n\nThe end."
    )


# -- what can be run ------------------------------------------------------------


def test_what_simulate_prints():
    page = documents.read("docs/choosing-a-gap.md")
    shown = page.partition("<!-- output of mtplx simulate -->\n```text\n")[2]
    shown = shown.partition("```")[0]
    assert shown
    printed = CliRunner().invoke(app, ["simulate"], env={"COLUMNS": "100"}).output
    assert printed.startswith(shown)
    told = page.partition("Read it as follows.")[2].partition("\n\n")[0]
    figures = re.findall(r"([\d.]+) ms", told)
    assert figures
    assert not [figure for figure in figures if f" {figure}" not in shown]


def test_the_default_gap():
    page = documents.read("docs/choosing-a-gap.md")
    assert f"the target is {RELATIVE_ITL_TARGET} times" in page
    assert f"| {RELATIVE_ITL_TARGET} (the default) |" in page


@pytest.mark.parametrize("library", ["openai", "anthropic"])
def test_the_examples_for_the_sdks(library, capsys):
    [code] = [
        code
        for code in documents.blocks(documents.read("docs/clients.md"), "python")
        if code.startswith(f"from {library} ")
    ]
    server = Server()
    try:
        exec(code.replace("http://127.0.0.1:8000", server.url), {})
    finally:
        server.stop()
    assert "tokens were restored" in capsys.readouterr().out


def test_every_client_is_told():
    told = rows(documents.read("docs/clients.md"), "clients")
    assert [command for _, command, *_ in told] == [
        f"`mtplx connect {name}`" for name in CLIENTS
    ]
