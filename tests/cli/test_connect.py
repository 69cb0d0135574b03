"""``mtplx connect``: what is shown is what is written, and what was there stays."""

from __future__ import annotations

import json
import tomllib

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from mtplx.cli import config_files
from mtplx.cli.clients import CLIENTS, Target
from mtplx.cli.main import app
from mtplx.errors import ConfigError
from tests.server.conftest import Server
from tests.server.fakes import INFO

WRITING = [name for name, recipe in CLIENTS.items() if recipe(Target("u", "m")).files]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (
        "MTPLX_CONFIG",
        "MTPLX_API_KEY",
        "XDG_CONFIG_HOME",
        "CODEX_HOME",
        "CLAUDE_CONFIG_DIR",
        "LLM_USER_PATH",
        "CONTINUE_GLOBAL_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    running.stop()


def connect(*arguments, code=0):
    result = CliRunner().invoke(app, ["connect", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def refused(*arguments):
    result = CliRunner().invoke(app, ["connect", *map(str, arguments)])
    assert isinstance(result.exception, ConfigError), result.output
    return str(result.exception)


def parse(path):
    text = path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    return tomllib.loads(text) if path.suffix == ".toml" else YAML(typ="safe").load(text)


@pytest.mark.parametrize("client", CLIENTS)
def test_it_asks_the_server_for_model_and_context(server, client):
    shown = connect(client, "--url", server.url)
    assert INFO.name in shown or client == "open-webui"
    assert server.url in shown
    knows_context = client not in ("claude-code", "open-webui", "llm")
    assert (str(INFO.context_length) in shown) == knows_context


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_is_written_unless_asked(home, server, client):
    connect(client, "--url", server.url)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("client", WRITING)
def test_what_is_shown_is_what_is_written(home, server, client):
    shown = connect(client, "--url", server.url)
    connect(client, "--url", server.url, "--write")
    written = [path for path in home.rglob("*") if path.is_file()]
    assert written
    for path in written:
        assert f"# {path}\n{path.read_text()}" in shown
        assert path.stat().st_mode & 0o077 == 0, "keys are in there"


@pytest.mark.parametrize("client", WRITING)
def test_writing_twice_is_writing_once(home, server, client):
    connect(client, "--url", server.url, "--write")
    once = {path: parse(path) for path in home.rglob("*") if path.is_file()}
    connect(client, "--url", server.url, "--write")
    assert {path: parse(path) for path in once} == once


def test_another_model_is_added_and_the_same_one_changed(home):
    path = home / "settings.json"
    for model, tokens in [("a", 1), ("b", 2), ("a", 3)]:
        content = CLIENTS["zed"](Target("u", model, context_tokens=tokens)).files[0].content
        config_files.write(path, config_files.merged(path, content, {}))
    models = parse(path)["language_models"]["openai_compatible"]["mtplx"]
    told = [(m["name"], m["max_tokens"]) for m in models["available_models"]]
    assert told == [("a", 3), ("b", 2)]


@pytest.mark.parametrize(
    ("name", "before", "content", "after"),
    [
        (
            "a.json",
            '{"env": {"MINE": "1", "URL": "old"}, "list": [1]}',
            {"env": {"URL": "new"}},
            {"env": {"MINE": "1", "URL": "new"}, "list": [1]},
        ),
        (
            "a.toml",
            'model = "mine" # why\n\n[a.b]\nx = 1\n[c]\ny = 2\n',
            {"a": {"new": {"z": 3}}, "c": {"y": 4}},
            {"model": "mine", "a": {"b": {"x": 1}, "new": {"z": 3}}, "c": {"y": 4}},
        ),
        (
            "a.yaml",
            "# mine\nname: Me\nmodels:\n- name: one # first\n  model: x\n",
            {"models": [{"name": "two", "model": "y"}]},
            {
                "name": "Me",
                "models": [{"name": "one", "model": "x"}, {"name": "two", "model": "y"}],
            },
        ),
        (
            "list.yaml",
            "- model_id: one\n",
            [{"model_id": "two"}],
            [{"model_id": "one"}, {"model_id": "two"}],
        ),
        ("empty.json", "", {"a": 1}, {"a": 1}),
        ("empty.yaml", "", {"a": 1}, {"a": 1}),
    ],
)
def test_what_was_there_stays(tmp_path, name, before, content, after):
    path = tmp_path / name
    path.write_text(before)
    backup = config_files.write(path, config_files.merged(path, content, {}))
    assert parse(path) == after
    assert backup.read_text() == before
    for comment in ("# why", "# mine", "# first"):
        assert (comment in path.read_text()) == (comment in before)


def test_a_head_is_only_for_files_that_lack_it(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("name: Mine\n")
    head = {"name": "Local", "version": "1"}
    config_files.write(path, config_files.merged(path, {"models": [{"name": "x"}]}, head))
    assert parse(path) == {"name": "Mine", "models": [{"name": "x"}], "version": "1"}


def test_backups_are_never_overwritten(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    backups = [config_files.write(path, f'{{"n": {n}}}') for n in range(3)]
    assert [b.read_text() for b in backups] == ["{}", '{"n": 0}', '{"n": 1}']


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path):
    target = tmp_path / "dotfiles" / "a.json"
    target.parent.mkdir()
    target.write_text("{}")
    target.chmod(0o644)
    link = tmp_path / "a.json"
    link.symlink_to(target)
    config_files.write(link, '{"n": 1}')
    assert link.is_symlink()
    assert parse(target) == {"n": 1}
    assert target.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("a.json", '{\n// mine\n"a": 1}'),
        ("a.json", "[]"),
        ("a.toml", "x = "),
        ("a.yaml", "a: [1"),
        ("a.yaml", "- 1\n"),
    ],
)
def test_what_cannot_be_merged_is_left_alone(tmp_path, name, before):
    path = tmp_path / name
    path.write_text(before)
    with pytest.raises(ConfigError, match="by hand"):
        config_files.merged(path, {"b": 2}, {})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_codex_keeps_its_default_model(home, server):
    config = home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text('model = "gpt" # mine\n\n[mcp_servers.x]\ncommand = "y"\n')
    connect("codex", "--url", server.url, "--api-key", "secret", "--write")
    told = parse(config)
    assert (told["model"], told["mcp_servers"]) == ("gpt", {"x": {"command": "y"}})
    assert told["model_providers"]["mtplx"]["env_key"] == "MTPLX_API_KEY"
    profile = parse(home / ".codex" / "mtplx.config.toml")
    assert (profile["model"], profile["model_provider"]) == (INFO.name, "mtplx")
    assert "secret" not in config.read_text()


@pytest.mark.parametrize("client", CLIENTS)
def test_a_key_is_told(client):
    recipe = CLIENTS[client](Target("http://h:1", "m", api_key="sk-secret"))
    assert "sk-secret" in str(recipe)
    assert ("none" in str(CLIENTS[client](Target("http://h:1", "m")))) == (
        client not in ("codex", "llm")
    )


def test_without_a_server_the_model_must_be_named(home):
    url = "http://127.0.0.1:9"
    assert "--model" in refused("aider", "--url", url)
    shown = connect("aider", "--url", url, "--model", "big")
    assert "model: openai/big" in shown
    assert "max_input_tokens" not in shown


def test_an_unknown_client():
    assert "use one of claude-code, codex" in refused("emacs")


@pytest.mark.parametrize("client", sorted(set(CLIENTS) - set(WRITING)))
def test_what_only_the_client_should_write(server, client):
    assert f"mtplx connect {client}" in refused(client, "--url", server.url, "--write")
