"""API keys: where they come from, when they must be, who is let in, what is shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from mtplx.config import Settings
from mtplx.errors import ConfigError
from mtplx.server.auth import Keys, check_binding, read_keys
from tests.server.fakes import FakeEngine
from tests.server.small_app import small_client

FIRST, SECOND = "sk-first-secret", "sk-second-secret"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


@pytest.fixture
def client(engine: FakeEngine) -> TestClient:
    return small_client(engine, api_key=f"{FIRST}, {SECOND}")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_from_the_setting_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# the team\nfrom-file-1\n\n  from-file-2  \n#off\n")
    keys = read_keys(Settings(api_key=" a , b,", api_key_file=str(file)))
    assert len(keys) == 4
    ids = {keys.key_id([key]) for key in ("a", "b", "from-file-1", "from-file-2")}
    assert len(ids) == 4
    assert None not in ids
    assert all(keys.key_id([key]) is None for key in ("", "off", "# the team", "A", "a,b"))


def test_no_keys_let_everybody_in() -> None:
    assert len(read_keys(Settings())) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Settings(api_key=" , "), "api_key holds no key"),
        (Settings(api_key="a b"), "Key 1 of the api_key has a character"),
        (Settings(api_key="ok,schlüssel"), "Key 2 of the api_key has a character"),
        (Settings(api_key_file="/nowhere/keys"), "/nowhere/keys cannot be read"),
        (Settings(api_key="a", auth=False), "--no-auth says to ask for none"),
    ],
)
def test_keys_that_cannot_be_used(settings: Settings, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        read_keys(settings)
    assert "schlüssel" not in str(error.value)


def test_an_empty_key_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_keys(Settings(api_key_file=str(file)))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_this_machine_needs_no_keys(address: str) -> None:
    check_binding(address, Keys(), Settings())


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5", "fe80::1%eth0"])
def test_others_need_keys_unless_told(address: str) -> None:
    check_binding(address, Keys(["a"]), Settings())
    check_binding(address, Keys(), Settings(auth=False))
    advice = []
    for _ in range(2):
        with pytest.raises(ConfigError, match="--no-auth") as error:
            check_binding(address, Keys(), Settings())
        advice += re.findall(r"--api-key ([\w-]{32})\. ", str(error.value))
    assert len(set(advice)) == 2


def test_either_header_opens(client: TestClient) -> None:
    for headers in (
        bearer(FIRST),
        bearer(SECOND),
        {"Authorization": f"bearer  {SECOND} "},
        {"x-api-key": FIRST},
        {"x-api-key": "wrong"} | bearer(FIRST),
    ):
        assert client.get("/v1/models", headers=headers).status_code == 200, headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(FIRST[:-1]),
        bearer(f"{FIRST}, {SECOND}"),
        {"Authorization": FIRST},
        {"Authorization": f"Basic {FIRST}"},
        {"x-api-key": f"Bearer {FIRST}"},
        {"x-api-key": ""},
    ],
)
def test_nothing_else_does(client: TestClient, headers: dict[str, str]) -> None:
    answer = client.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_api_key",
        None,
    )
    assert FIRST not in answer.text


def test_the_other_shape_under_messages(client: TestClient) -> None:
    answer = client.post("/v1/messages", json={})
    assert answer.status_code == 401
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "authentication_error"
    known = client.post("/v1/messages", json={}, headers={"x-api-key": FIRST})
    assert known.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/metrics", "/openapi.json", "/v1/models", "/nothing", "/health/", "/docs"]
)
def test_only_health_is_open(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 401


def test_health_tells_a_stranger_the_status_alone(client: TestClient) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health").status_code == 200
    told = client.get("/health", headers=bearer(FIRST)).json()
    assert told["settings"]["api_key"] == {"value": "(not shown)", "source": "flag"}
    assert FIRST not in str(told)
    assert SECOND not in str(told)


def test_health_of_a_server_without_keys_tells_all(engine: FakeEngine) -> None:
    told = small_client(engine).get("/health").json()
    assert told["settings"]["api_key"] == {"value": None, "source": "default"}


def test_a_key_is_logged_by_its_id(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mtplx.server"):
        client.get("/v1/models", headers=bearer(FIRST))
        client.get("/v1/models", headers=bearer("wrong-secret"))
    mine = [r.getMessage() for r in caplog.records if r.name.startswith("mtplx")]
    known, unknown = mine[-2:]
    name = Keys([FIRST]).key_id([FIRST])
    assert f" key={name} " in known
    assert " key=" not in unknown
    assert "secret" not in caplog.text


def test_keys_are_not_in_a_repr() -> None:
    assert FIRST not in repr(Keys([FIRST])) + str(vars(Keys([FIRST])))
