"""Request ids and the log line."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fastapi import Request
from fastapi.testclient import TestClient

from mtplx.server.access import RequestRecord
from tests.server.fakes import FakeEngine
from tests.server.small_app import LOCAL, small_app


async def talk(request: Request) -> None:
    record = RequestRecord.of(request)
    record.prompt_text, record.answer_text = 'Say "ü"\nnow \ud800', ""


@pytest.fixture
def http() -> Iterator[TestClient]:
    engine = FakeEngine()
    app = small_app(engine)
    app.get("/talk/{name}")(talk)
    yield TestClient(app, base_url=LOCAL)
    engine.close()


@pytest.mark.parametrize("sent", ["a", "trace-1.2_3:4/5@6=7+8", "x" * 128])
def test_a_clients_id_comes_back(http: TestClient, sent: str) -> None:
    answer = http.get("/health", headers={"X-Request-Id": sent})
    assert answer.headers["x-request-id"] == sent
    assert answer.headers["request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "two words", 'a"b', "ä".encode("latin-1")])
def test_an_ill_formed_id_is_replaced(http: TestClient, sent: str | bytes) -> None:
    answers = [http.get("/health", headers={"X-Request-Id": sent}) for _ in range(2)]  # type: ignore[dict-item]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert all(len(each) == 32 for each in ids)
    assert answers[0].headers["request-id"] in ids


def test_a_refusal_has_the_id_too(http: TestClient) -> None:
    answer = http.get("/nothing", headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "mine")


def test_one_line_of_keys_and_values(
    http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mtplx.server"):
        http.get("/talk/a%20b%0A?secret=1", headers={"X-Request-Id": "mine"})
    line = caplog.records[-1].getMessage()
    assert " client_id=mine method=GET path=/talk/a%20b%0A status=200 total=" in line
    assert line.endswith(' in="Say \\"ü\\"\\nnow ?" out=""')
    assert line.startswith("request=")
    assert "secret" not in line


def test_texts_are_logged_only_where_a_route_gave_them(
    http: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mtplx.server"):
        http.get("/health")
    assert " in=" not in caplog.text
    assert " out=" not in caplog.text
