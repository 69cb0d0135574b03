"""Web pages: who may read, who may call, and that nobody gets in by a name of his own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mtplx.config import Settings
from mtplx.errors import ConfigError
from mtplx.server.origins import read_origins
from tests.server.fakes import FakeEngine
from tests.server.small_app import LOCAL, small_app

KEY = "sk-secret"
PAGE = "https://evil.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine()
    yield engine
    engine.close()


async def change() -> None:
    """Stand for a route that a browser may call without asking first."""


def client(engine: FakeEngine, origins: str = "", **flags: Any) -> TestClient:
    app = small_app(engine, cors_origins=origins, **flags)
    app.post("/change")(change)
    return TestClient(app, base_url=LOCAL)


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("*", PAGE),
        ("https://chat.example", "https://chat.example"),
        ("tauri://localhost", "tauri://localhost"),
        ("vscode-webview://*", "vscode-webview://1a2b3c"),
        ("app://obsidian.md, http://localhost:*", "http://localhost:5173"),
        ("https://*.example", "https://chat.example"),
        ("file://", "file://"),
        ("null", "null"),
    ],
)
@pytest.mark.parametrize("key", [None, KEY])
def test_an_allowed_page(
    engine: FakeEngine, allowed: str, origin: str, key: str | None
) -> None:
    http = client(engine, allowed, api_key=key)
    before = http.options("/change", headers={"Origin": origin} | PREFLIGHT)
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == origin
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    headers = {"Origin": origin} | ({"Authorization": f"Bearer {key}"} if key else {})
    answer = http.post("/change", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_a_page_can_read_why_it_was_refused(engine: FakeEngine) -> None:
    answer = client(engine, PAGE, api_key=KEY).post("/change", headers={"Origin": PAGE})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    ("allowed", "origin"),
    [
        ("", PAGE),
        ("", "null"),
        ("", "tauri://localhost"),
        ("", "http://localhost:3000"),
        ("https://chat.example", "http://chat.example"),
        ("https://chat.example", "https://chat.example.evil.com"),
        ("http://localhost:*", "http://localhost.evil.com"),
        ("https://a.example", "https://axexample"),
    ],
)
def test_another_page_may_not_call(engine: FakeEngine, allowed: str, origin: str) -> None:
    http = client(engine, allowed)
    before = http.options("/change", headers={"Origin": origin} | PREFLIGHT)
    assert before.status_code == 400
    assert "access-control-allow-origin" not in before.headers
    answer = http.post("/change", headers={"Origin": origin})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "origin_refused"
    assert f"--cors-origins {origin} " in answer.json()["error"]["message"]
    seen = http.get("/health", headers={"Origin": origin})
    assert "access-control-allow-origin" not in seen.headers


def test_our_own_page_and_programs_may_call(engine: FakeEngine) -> None:
    http = client(engine)
    assert http.post("/change").status_code == 200
    own = {"Origin": "http://127.0.0.1:8000"}
    assert http.post("/change", headers=own).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8000",
        "[::1]:8000",
        "localhost:8000",
        "LOCALHOST",
        "192.168.1.5",
        "box",
        "host.docker.internal:8000",
        "mac.local:8000",
        "app.localhost",
    ],
)
def test_names_that_nobody_can_own(engine: FakeEngine, host: str) -> None:
    assert client(engine).get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "localhost.evil.com", "127.0.0.1.nip.io", "[::", "a.b."]
)
def test_a_name_that_may_be_anybodys(engine: FakeEngine, host: str) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    answer = client(engine).post("/change", headers=headers)
    assert answer.status_code == 403
    assert "public name" in answer.json()["error"]["message"]
    assert client(engine).get("/health", headers={"Host": host}).status_code == 403
    keyed = client(engine, api_key=KEY)
    assert keyed.get("/health", headers={"Host": host}).status_code == 200
    told = client(engine, auth=False)
    assert told.get("/health", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origins", ["chat.example", "https://a.example/path", "a b"])
def test_what_is_no_origin(origins: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        read_origins(Settings(cors_origins=origins))
