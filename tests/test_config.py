"""Flag > environment > file > default, and errors that say what to write."""

from __future__ import annotations

import pytest

from mtplx.config import Settings, cache_folder, config_folder, read_configuration
from mtplx.errors import ConfigError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text('port = 1\nhost = "file"\ndtype = "float16"\n', encoding="utf-8")
    return path


def test_the_nearest_source_wins(file):
    read = read_configuration(
        {"port": 3, "host": None},
        environment={"MTPLX_PORT": "2", "MTPLX_HOST": "environment"},
        file=file,
    )
    settings, sources = read.settings, read.sources
    assert (settings.port, sources["port"]) == (3, "flag")
    assert (settings.host, sources["host"]) == ("environment", "environment")
    assert (settings.dtype, sources["dtype"]) == ("float16", "file")
    assert (settings.model, sources["model"]) == ("demo", "default")
    assert set(sources) == set(Settings.model_fields)


def test_without_anything_the_defaults_hold(tmp_path):
    read = read_configuration(environment={"XDG_CONFIG_HOME": str(tmp_path)})
    assert read.settings == Settings()


def test_the_users_file_is_found(tmp_path):
    (tmp_path / "mtplx").mkdir()
    (tmp_path / "mtplx/config.toml").write_text("port = 9\n", encoding="utf-8")
    assert (
        read_configuration(environment={"XDG_CONFIG_HOME": str(tmp_path)}).settings.port
        == 9
    )


def test_the_environment_can_name_the_file(file):
    assert read_configuration(environment={"MTPLX_CONFIG": str(file)}).settings.port == 1


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        ({"port": 70000}, {}, ("'port'", "flag", "70000", "Port to listen on")),
        ({}, {"MTPLX_PORT": "many"}, ("'port'", "environment", "'many'")),
        ({"dtype": "int4"}, {}, ("'dtype'", "'int4'", "bfloat16")),
        ({"max_queue": 0}, {}, ("'max_queue'", "greater than or equal to 1")),
        ({"prot": 1}, {}, ("Unknown setting 'prot'", "flag", "port")),
    ],
)
def test_a_wrong_value_is_named_with_its_source(flags, environment, said, tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path), **environment}
    with pytest.raises(ConfigError) as caught:
        read_configuration(flags, environment=environment)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("text", ["port = ", "\xff\xfe", "prot = 1\n"])
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"broken\.toml|'prot' in the file"):
        read_configuration(environment={}, file=path)


def test_a_file_that_was_named_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_configuration(environment={}, file=tmp_path / "none.toml")


def test_folders_follow_the_environment(tmp_path):
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "c")}
    assert config_folder(environment) == tmp_path / "mtplx"
    assert cache_folder(environment) == tmp_path / "c/mtplx"
    assert cache_folder({"MTPLX_CACHE_DIR": str(tmp_path)}) == tmp_path


def test_every_setting_explains_itself():
    for name, field in Settings.model_fields.items():
        assert field.description, name
