"""Models, health, and the OpenAPI document."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI

from mtplx import __version__
from mtplx.config import Settings
from tests.server.conftest import INFO, MAX_BODY_BYTES
from tests.server.fakes import FakeEngine

MODEL = {
    "id": INFO.name,
    "object": "model",
    "created": INFO.created,
    "owned_by": "mtplx",
    "loaded": True,
    "context_length": INFO.context_length,
    "max_model_len": INFO.context_length,
}


def test_models(http: httpx.Client, openai: OpenAI) -> None:
    assert http.get("/v1/models").json() == {"object": "list", "data": [MODEL]}
    assert http.get(f"/v1/models/{INFO.name}").json() == MODEL
    assert [model.id for model in openai.models.list()] == [INFO.name]
    assert openai.models.retrieve(INFO.name).id == INFO.name


def test_health_answers_while_the_engine_is_busy(
    engine: FakeEngine, http: httpx.Client
) -> None:
    engine.gate.clear()
    body = {"prompt": "Hi", "stream": True}
    with http.stream("POST", "/v1/completions", json=body):
        engine.wait_submitted()
        answer = http.get("/health")
    health = answer.json()
    assert answer.status_code == 200
    assert health["status"] == "ok"
    assert health["version"] == __version__
    assert health["model"]["name"] == INFO.name
    assert health["engine"]["running"] == 1
    assert set(health["settings"]) == set(Settings.model_fields)
    assert health["settings"]["max_body_bytes"] == {
        "value": MAX_BODY_BYTES,
        "source": "flag",
    }
    assert health["settings"]["tail_grid"]["source"] == "default"


def test_health_of_a_dead_engine(engine: FakeEngine, http: httpx.Client) -> None:
    engine.alive = False
    answer = http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["status"] == "unavailable"


def test_head(http: httpx.Client) -> None:
    for path in ("/health", "/v1/models", f"/v1/models/{INFO.name}"):
        answer = http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_that_loads_from_elsewhere(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404
    assert "<script" not in answer.text


def test_document_describes_bodies_and_answers(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    post = document["paths"]["/v1/chat/completions"]["post"]
    body = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert schemas[body.rpartition("/")[2]]["required"] == ["messages"]
    assert "mtplx" in schemas[answer.rpartition("/")[2]]["properties"]
    assert "413" in post["responses"]
    missing = [ref for ref in _refs(document) if ref.rpartition("/")[2] not in schemas]
    assert missing == []


def _refs(node: object) -> list[str]:
    if isinstance(node, list):
        return [ref for item in node for ref in _refs(item)]
    if isinstance(node, dict):
        here = [node["$ref"]] if "$ref" in node else []
        return here + [ref for item in node.values() for ref in _refs(item)]
    return []
