"""Several models behind one server: each route finds the one that is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from mtplx.errors import ConfigError, ModelLoadError, QueueFullError
from tests.server.conftest import Server
from tests.server.fakes import INFO, FakeEngine, fake_model
from tests.server.small_app import small_app, small_client
from tests.server.test_disconnect import send_raw

OTHER = "other"
USER = [{"role": "user", "content": "Hi"}]
TEXT = {"prompt": "Hi"}
# Each route with a body that it reads.
GENERATING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", TEXT),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 5}),
    ("/v1/prefill", TEXT),
]
READING: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses/input_tokens", {"input": "Hi"}),
    ("/v1/messages/count_tokens", {"messages": USER}),
    ("/tokenize", TEXT),
    ("/tokenize", {"messages": USER}),
    ("/detokenize", {"tokens": [72, 105]}),
]
ROUTES = GENERATING + READING


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """Two models; the second one reads less, and has a vocabulary of its own."""
    engine = FakeEngine(
        fake_model(OTHER, context_length=99, vocab_size=110, fingerprint="f" * 32)
    )
    yield engine
    engine.open_gate()
    engine.close()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with small_client(engine, aliases=f"fast={OTHER},claude-*={OTHER}") as client:
        yield client


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_route_loads_what_it_is_asked_for(
    http: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    assert http.post(path, json=body | {"model": INFO.name}).status_code == 200
    assert engine.loads == []
    for name in (OTHER, "fast", "claude-opus-4"):
        assert http.post(path, json=body | {"model": name}).status_code == 200
    assert engine.loads == [OTHER]
    answering = [request.model for request in engine.requests]
    assert answering == ([INFO.name, *[OTHER] * 3] if answering else [])
    assert bool(answering) == ((path, body) in GENERATING)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_an_unknown_one_is_told_what_there_is(
    http: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body | {"model": "gpt-5"})
    assert answer.status_code == 404
    said = "The model 'gpt-5' is not served here; use one of 'org/fake-model', 'other'."
    assert answer.json()["error"]["message"] == said
    assert engine.loads == []


def test_answers_say_which_model_it_was(http: TestClient) -> None:
    for path, body in GENERATING:
        told = http.post(path, json=body | {"model": "fast"}).json()
        if path == "/v1/messages":  # Its clients want the name back that they sent.
            assert told["model"] == "fast"
            told = told["mtplx"]
        assert told["model"] == OTHER
    chat = {"messages": USER, "model": OTHER}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert answer["system_fingerprint"] == "fp_ffffffffffff"


def test_limits_are_those_of_the_model(http: TestClient, engine: FakeEngine) -> None:
    long = {"prompt": "x" * 150}
    assert http.post("/v1/completions", json=long).status_code == 200
    refused = http.post("/v1/completions", json=long | {"model": OTHER})
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    ids = {"prompt": [200]}
    assert http.post("/v1/completions", json=ids).status_code == 200
    refused = http.post("/v1/completions", json=ids | {"model": OTHER})
    assert refused.json()["error"]["param"] == "prompt[0]"
    tokens = http.post("/tokenize", json=TEXT | {"model": OTHER}).json()
    assert tokens["max_model_len"] == 99


def test_the_list_tells_what_is_known(http: TestClient) -> None:
    first = {
        "id": INFO.name,
        "object": "model",
        "created": INFO.created,
        "owned_by": "mtplx",
        "loaded": True,
        "context_length": INFO.context_length,
        "max_model_len": INFO.context_length,
    }
    other = {
        "id": OTHER,
        "object": "model",
        "created": INFO.created,
        "owned_by": "mtplx",
        "loaded": False,
    }
    assert http.get("/v1/models").json()["data"] == [first, other]
    assert http.get("/v1/models/fast").json() == other
    assert [each["name"] for each in http.get("/health").json()["models"]] == [INFO.name]
    http.post("/v1/completions", json=TEXT | {"model": OTHER})
    length = {"context_length": 99, "max_model_len": 99}
    assert http.get(f"/v1/models/{OTHER}").json() == other | {"loaded": True} | length
    health = http.get("/health").json()
    assert health["model"]["name"] == INFO.name
    assert [each["name"] for each in health["models"]] == [INFO.name, OTHER]
    assert 'mtplx_model_info{device="cpu",dtype="float32",' in http.get("/metrics").text
    assert f'name="{OTHER}"' in http.get("/metrics").text


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ModelLoadError("The weights are not there."), 500, "model_load_error"),
        (QueueFullError("All are in use.", retry_after_s=10), 429, "queue_full"),
    ],
)
def test_one_that_cannot_be_loaded(
    http: TestClient, engine: FakeEngine, error: Exception, status: int, code: str
) -> None:
    engine.unloadable = error
    body = {"messages": USER, "model": OTHER, "max_tokens": 5}
    for stream in (False, True):
        asked = body | {"stream": stream}
        answer = http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code
        assert answer.json()["error"]["message"] == str(error)
        answer = http.post("/v1/messages", json=asked)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == str(error)
    engine.unloadable = None
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_the_server_answers_while_a_model_is_loaded(
    http: TestClient, engine: FakeEngine
) -> None:
    engine.gate.clear()
    statuses: list[int] = []

    def ask() -> None:
        body = {"prompt": "Hi", "model": OTHER}
        statuses.append(http.post("/v1/completions", json=body).status_code)

    client = threading.Thread(target=ask)
    client.start()
    assert http.get("/health").json()["status"] == "ok"
    assert http.get(f"/v1/models/{OTHER}").json()["loaded"] is False
    engine.open_gate()
    client.join(10)
    assert statuses == [200]


def test_a_model_is_loaded_although_its_client_left() -> None:
    engine = FakeEngine(fake_model(OTHER))
    server = Server(engine)
    try:
        engine.gate.clear()
        client = send_raw(server, {"messages": USER, "model": OTHER})
        engine.wait(lambda: engine.loading == OTHER)
        client.close()
        engine.open_gate()
        engine.wait(lambda: engine.loads == [OTHER])
        with httpx.Client(base_url=server.url, timeout=10, trust_env=False) as http:
            answer = http.post("/v1/completions", json=TEXT | {"model": OTHER})
        assert answer.json()["model"] == OTHER
    finally:
        server.stop()


def test_a_response_is_continued_by_another_model(http: TestClient) -> None:
    first = http.post("/v1/responses", json={"input": "Hi"}).json()
    body = {"input": "Go on", "previous_response_id": first["id"], "model": OTHER}
    assert http.post("/v1/responses", json=body).json()["model"] == OTHER


@pytest.mark.parametrize("argument", ["demo", "/models/mine", "org/fake-model"])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_the_argument_of_serve_is_a_name(
    engine: FakeEngine, argument: str, path: str, body: dict[str, Any]
) -> None:
    with small_client(engine, model=argument, also=f"{OTHER}=a/b") as http:
        for name, real in [(argument, INFO.name), ("fake-model", INFO.name), ("b", OTHER)]:
            answer = http.post(path, json=body | {"model": name})
            assert answer.status_code == 200, answer.text
            if (path, body) in GENERATING:
                assert (answer.json().get("mtplx") or {}).get("model", real) == real
                assert engine.requests[-1].model == real
                if path != "/v1/messages":
                    assert answer.json()["model"] == real
            assert http.get(f"/v1/models/{name}").json()["id"] == real


def test_an_alias_of_nothing_is_told_at_start(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="no model 'none'"):
        small_app(engine, aliases="fast=none")
