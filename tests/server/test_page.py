"""The files of the page: what is served, to whom, under which policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from fastapi.testclient import TestClient

from tests.server.fakes import FakeEngine
from tests.server.small_app import small_client

FOLDER = files("mtplx.server.page")
OWN = [entry for entry in FOLDER.iterdir() if entry.name.endswith((".js", ".html", ".css"))]
REFERENCE = re.compile(r'(?:src|href)="([^"#$]+)"|(?:from|import) "([^"]+)"')


@pytest.fixture
def client() -> Iterator[TestClient]:
    engine = FakeEngine()
    yield small_client(engine)
    engine.close()


@pytest.fixture
def keyed() -> Iterator[TestClient]:
    engine = FakeEngine()
    yield small_client(engine, api_key="secret")
    engine.close()


def references() -> list[str]:
    """Return the paths that the page's own files name."""
    found = [pair for entry in OWN for pair in REFERENCE.findall(entry.read_text("utf-8"))]
    return sorted({(a or b).replace("./", "/page/") for a, b in found})


def test_the_files_name_only_each_other() -> None:
    assert len(references()) > 15
    assert all(re.fullmatch(r"/page/[\w./-]+", path) for path in references())


@pytest.mark.parametrize("path", ["/", *references()])
def test_each_is_there_without_a_key(keyed: TestClient, path: str) -> None:
    answer = keyed.get(path)
    assert answer.status_code == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert keyed.head(path).headers["etag"] == answer.headers["etag"]


def test_scripts_and_styles_stand_in_files(client: TestClient) -> None:
    page = client.get("/").text
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\son\w+=|\sstyle=", page)


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/page/main.js", "text/javascript; charset=utf-8"),
        ("/page/base.css", "text/css; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/page/vendor/marked.LICENSE.txt", "text/plain; charset=utf-8"),
    ],
)
def test_media_types(client: TestClient, path: str, media_type: str) -> None:
    assert client.get(path).headers["content-type"] == media_type


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/vendor",
        "/page/nothing.js",
        "/page/__init__.py",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2fapp.py",
        "/page//etc/passwd",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_url"


def test_what_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/")
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/page/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


@pytest.mark.parametrize("path", ["/v1/live", "/v1/models", "/pages/x", "/page"])
def test_all_else_needs_the_key(keyed: TestClient, path: str) -> None:
    assert keyed.get(path).status_code == 401


def test_a_host_that_may_be_somebody_else_s_gets_no_page(client: TestClient) -> None:
    assert client.get("/", headers={"Host": "rebound.example.com"}).status_code == 403


def test_no_module_is_too_long_to_read() -> None:
    for entry in OWN:
        assert len(entry.read_text("utf-8").splitlines()) < 400, entry.name


def test_what_is_vendored_has_its_license() -> None:
    vendored = {entry.name.partition(".")[0] for entry in (FOLDER / "vendor").iterdir()}
    for name in vendored:
        assert "ermission" in (FOLDER / "vendor" / f"{name}.LICENSE.txt").read_text("utf-8")
