"""The whole application as it is put together: keys, pages, ids and numbers at once."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from fastapi.testclient import TestClient

from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine
from tests.server.small_app import LOCAL, small_client

KEY = "sk-secret"
USER = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def http() -> Iterator[TestClient]:
    engine = FakeEngine()
    yield small_client(engine, api_key=KEY, cors_origins="tauri://localhost")
    engine.close()


def openai_client(http: TestClient, key: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{LOCAL}/v1", api_key=key, max_retries=0, http_client=http
    )


def anthropic_client(http: TestClient, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=LOCAL, api_key=key, max_retries=0, http_client=http)


def test_openais_client(http: TestClient) -> None:
    with pytest.raises(openai.AuthenticationError) as error:
        openai_client(http, "wrong").models.list()
    assert error.value.code == "invalid_api_key"
    assert error.value.request_id
    answer = openai_client(http, KEY).chat.completions.create(
        model=INFO.name, messages=USER, extra_headers={"X-Request-Id": "mine"}
    )
    assert answer._request_id == "mine"
    assert answer.id != "chatcmpl-mine"


def test_anthropics_client(http: TestClient) -> None:
    def ask(key: str) -> anthropic.types.Message:
        return anthropic_client(http, key).messages.create(
            model=INFO.name, messages=USER, max_tokens=5
        )

    with pytest.raises(anthropic.AuthenticationError) as error:
        ask("wrong")
    assert error.value.request_id
    assert ask(KEY)._request_id


def test_a_request_leaves_its_numbers(http: TestClient) -> None:
    key = {"Authorization": f"Bearer {KEY}", "Origin": "tauri://localhost"}
    for stream in (False, True):
        body = {"messages": USER, "stream": stream}
        answer = http.post("/v1/chat/completions", json=body, headers=key)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "tauri://localhost"
    text = http.get("/metrics", headers=key).text
    ended = 'method="POST",outcome="stop",route="/v1/chat/completions",status="200"'
    assert f"mtplx_requests_total{{{ended}}} 2.0" in text
    assert "mtplx_time_to_first_token_seconds_count 2.0" in text
    assert KEY not in text


def test_the_document_needs_the_key_too(http: TestClient) -> None:
    assert http.get("/openapi.json").status_code == 401
    document = http.get("/openapi.json", headers={"x-api-key": KEY}).json()
    for path in ("/tokenize", "/detokenize", "/v1/prefill", "/v1/prefill/plan"):
        assert "post" in document["paths"][path]
