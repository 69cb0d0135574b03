"""The OpenAPI document says what the server does.

``benchmarks/fuzz.py`` holds the two against each other in thousands of cases; here is
what such a run found, or could not see.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from mtplx.server.app import BODIES
from mtplx.server.openapi import Application
from mtplx.server.requests import JsonObject
from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine
from tests.server.small_app import small_app

Json = dict[str, Any]
USER = [{"role": "user", "content": "Hello"}]
REQUIRED: dict[str, Json] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": INFO.name, "messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": INFO.name, "messages": USER},
    "/detokenize": {"tokens": [72]},
}


@pytest.fixture(scope="module")
def document() -> Json:
    engine = FakeEngine()
    try:
        return small_app(engine).openapi()
    finally:
        engine.close()


def schema_of(document: Json, model: type[JsonObject]) -> Json:
    schema: Json = document["components"]["schemas"][model.__name__]
    return schema


def operations(document: Json) -> Iterator[tuple[str, Json]]:
    for path, methods in document["paths"].items():
        for operation in methods.values():
            yield path, operation


@pytest.mark.parametrize("model", BODIES)
def test_what_may_be_absent_may_be_null(document: Json, model: type[JsonObject]) -> None:
    schema = schema_of(document, model)
    required = set(schema.get("required", ()))
    declared = {
        each.alias or name: each.is_required() for name, each in model.model_fields.items()
    }
    assert required == {name for name, needed in declared.items() if needed}
    for name in declared:
        null = {"type": "null"} in schema["properties"][name].get("anyOf", ())
        assert null == (name not in required), name


@pytest.mark.parametrize("path", REQUIRED)
def test_the_server_takes_null_for_all_of_that(
    http: httpx.Client, document: Json, path: str
) -> None:
    post = document["paths"][path]["post"]
    content = post["requestBody"]["content"]["application/json"]["schema"]
    name = content["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][name]["properties"]
    body = dict.fromkeys(fields) | REQUIRED[path]
    assert len(body) > len(REQUIRED[path])
    assert http.post(path, json=body).status_code == 200


@pytest.mark.parametrize("model", BODIES)
def test_the_tables_of_fields_are_told(document: Json, model: type[JsonObject]) -> None:
    schema = schema_of(document, model)
    assert schema["additionalProperties"] is False
    for name, reason in model.table.ignored.items():
        assert reason in schema["properties"][name]["description"]
    for name, accepted in model.table.refused.items():
        assert schema["properties"][name]["enum"] == [*accepted, None]


def test_what_holds_between_fields_is_told(document: Json) -> None:
    """Without it, a fuzzer's chats all ended at their first message."""
    schemas = document["components"]["schemas"]
    kinds = schemas["Message"]["anyOf"]
    roles = [role for kind in kinds for role in kind["properties"]["role"]["enum"]]
    assert set(roles) == set(schemas["Message"]["properties"]["role"]["enum"])
    for name in ("ChatBody", "CompletionBody"):
        streamed, whole = schemas[name]["anyOf"]
        assert streamed["properties"] == {"stream": {"const": True}}
        assert set(whole["properties"]) == {"stream_options", "return_progress"}


def test_nothing_is_told_that_is_never_sent(document: Json) -> None:
    assert "HTTPValidationError" not in str(document)
    for path, operation in operations(document):
        assert "422" not in operation["responses"], path


def test_streams_are_told_with_their_events(document: Json) -> None:
    streamed = {}
    for path, operation in operations(document):
        content = operation["responses"]["200"]["content"]
        if "text/event-stream" in content:
            assert ("application/json" in content) == (path != "/v1/live")
            streamed[path] = content["text/event-stream"]["itemSchema"]["properties"]
    ends = {path: "[DONE]" in str(each["data"]) for path, each in streamed.items()}
    assert ends == {
        "/v1/chat/completions": True,
        "/v1/completions": True,
        "/v1/responses": False,
        "/v1/messages": False,
        "/v1/live": False,
    }
    assert "ChatCompletionChunk" in str(streamed["/v1/chat/completions"])


def test_metrics_are_told_as_text(document: Json) -> None:
    content = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"text/plain", "application/openmetrics-text"}


def test_a_key_is_asked_for_where_there_are_keys(engine: FakeEngine) -> None:
    open_to_all = small_app(engine).openapi()
    assert set(open_to_all["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert "security" not in open_to_all
    keyed = small_app(engine, api_key="k" * 32).openapi()
    assert keyed["security"] == [{"bearer": []}, {"x-api-key": []}]
    own = {path for path, operation in operations(keyed) if "security" in operation}
    assert own == {"/health"}
    assert {} in keyed["paths"]["/health"]["get"]["security"]


def test_two_shapes_of_one_name_are_noticed() -> None:
    """A body's ``ToolCall`` had replaced the one of answers."""

    class Same(TypedDict):
        a: int

    def other() -> type[BaseModel]:
        class Same(BaseModel):
            b: str

        return Same

    app = Application()
    app.get("/", response_model=Same)(lambda: None)
    app.shapes = (other(),)
    with pytest.raises(AssertionError, match="two shapes are called Same"):
        app.openapi()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/responses/resp_1", "DELETE, GET"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/responses/input_tokens", "POST"),
        ("GET", "/v1/messages", "POST"),
    ],
)
def test_allow_names_every_method_of_the_path(
    http: httpx.Client, method: str, path: str, allowed: str
) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
def test_wrong_paths_of_anthropic_s_api_have_its_errors(
    http: httpx.Client, method: str, path: str, status: int, kind: str
) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == kind
