"""Bad bodies: each a 4xx in OpenAI's shape that names the field, and the next request
works."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from mtplx.server.chat_body import ChatBody
from mtplx.server.fields import CHAT as TABLE
from tests.server.conftest import INFO, MAX_BODY_BYTES
from tests.server.fakes import FakeEngine

CHAT = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "Hello"}]
VALUE, TYPE = "invalid_value", "invalid_type"
UNSUPPORTED, UNKNOWN = "unsupported_parameter", "unknown_parameter"
MISSING = "missing_required_parameter"


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*USER, fields]}


def check(answer: httpx.Response, status: int, param: str | None, code: str) -> str:
    """Assert the shape of an error, and return its message."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error = body["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith((".", "?"))
    assert len(error["message"]) < 400
    return str(error["message"])


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}


BAD_FIELDS = [
    ({"messages": []}, "messages", VALUE),
    ({"messages": None}, "messages", MISSING),
    ({"messages": "Hello"}, "messages", TYPE),
    ({"messages": {"role": "user"}}, "messages", TYPE),
    ({"messages": ["Hello"]}, "messages[0]", TYPE),
    (message(role="wizard", content="x"), "messages[1].role", VALUE),
    (message(role=1, content="x"), "messages[1].role", TYPE),
    (message(content="x"), "messages[1].role", MISSING),
    (message(role="function", content="x"), "messages[1].role", UNSUPPORTED),
    (message(role="tool", content="x"), "messages[1].tool_call_id", VALUE),
    (
        message(role="user", content="x", tool_call_id="a"),
        "messages[1].tool_call_id",
        VALUE,
    ),
    (message(role="user"), "messages[1].content", MISSING),
    (message(role="user", content=None), "messages[1].content", MISSING),
    (message(role="user", content=5), "messages[1].content", VALUE),
    (message(role="user", content={"text": "x"}), "messages[1].content", VALUE),
    (message(role="user", content=["x"]), "messages[1].content[0]", TYPE),
    (message(role="user", content="x", id=5), "messages[1].id", UNKNOWN),
    (
        message(role="assistant", tool_calls=[{"id": "1"}]),
        "messages[1].tool_calls[0].function",
        MISSING,
    ),
    (
        message(role="assistant", tool_calls=[CALL | {"type": "custom"}]),
        "messages[1].tool_calls[0].type",
        UNSUPPORTED,
    ),
    (message(role="user", content="x", tool_calls=[CALL]), "messages[1].tool_calls", VALUE),
    (
        message(role="assistant", content="x", function_call={"name": "f"}),
        "messages[1].function_call",
        UNSUPPORTED,
    ),
    (message(role="assistant", content=None), "messages[1].content", MISSING),
    (part(type="text"), "messages[0].content[0].text", MISSING),
    (part(type="text", text=5), "messages[0].content[0].text", TYPE),
    (part(type="image_url", text="x"), "messages[0].content[0].type", UNSUPPORTED),
    (
        part(type="image_url", image_url={"url": "x"}),
        "messages[0].content[0].image_url",
        UNSUPPORTED,
    ),
    ({"model": "llama"}, "model", "model_not_found"),
    ({"model": 5}, "model", TYPE),
    ({"temperature": -0.1}, "temperature", VALUE),
    ({"temperature": 2.1}, "temperature", VALUE),
    ({"temperature": "0.7"}, "temperature", TYPE),
    ({"temperature": True}, "temperature", TYPE),
    ({"temperature": 10**400}, "temperature", TYPE),
    ({"top_p": 0}, "top_p", VALUE),
    ({"top_p": 1.1}, "top_p", VALUE),
    ({"top_k": -2}, "top_k", VALUE),
    ({"top_k": 1.5}, "top_k", TYPE),
    ({"min_p": 1.1}, "min_p", VALUE),
    ({"seed": 2**63}, "seed", VALUE),
    ({"seed": "1"}, "seed", TYPE),
    ({"repetition_penalty": 0}, "repetition_penalty", VALUE),
    ({"presence_penalty": 3}, "presence_penalty", VALUE),
    ({"frequency_penalty": -3}, "frequency_penalty", VALUE),
    ({"stop": ""}, "stop[0]", VALUE),
    ({"stop": ["a", 5]}, "stop[1]", TYPE),
    ({"stop": ["a"] * 17}, "stop", VALUE),
    ({"stop": "a" * 513}, "stop[0]", VALUE),
    ({"stop": 5}, "stop", TYPE),
    ({"max_tokens": 0}, "max_tokens", VALUE),
    ({"max_tokens": -1}, "max_tokens", VALUE),
    ({"max_tokens": -(10**400)}, "max_tokens", VALUE),
    ({"max_tokens": 1.0}, "max_tokens", TYPE),
    ({"max_tokens": True}, "max_tokens", TYPE),
    ({"max_completion_tokens": 0}, "max_completion_tokens", VALUE),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", VALUE),
    ({"stream": "true"}, "stream", TYPE),
    ({"stream": 1}, "stream", TYPE),
    ({"stream_options": {"include_usage": True}}, "stream_options", VALUE),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        TYPE,
    ),
    ({"stream": True, "stream_options": []}, "stream_options", TYPE),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        UNSUPPORTED,
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", TYPE),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", VALUE),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom", UNSUPPORTED),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [TOOL, TOOL]}, "tools", VALUE),
    ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name", VALUE),
    ({"tool_choice": "required"}, "tool_choice", VALUE),
    ({"tool_choice": "any"}, "tool_choice", VALUE),
    ({"tool_choice": TOOL}, "tool_choice", VALUE),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function"}},
        "tool_choice.function",
        MISSING,
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        MISSING,
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type",
        UNSUPPORTED,
    ),
    ({"functions": [{"name": "f"}]}, "functions", UNSUPPORTED),
    ({"function_call": {"name": "f"}}, "function_call", UNSUPPORTED),
    ({"n": 0}, "n", VALUE),
    ({"n": 17}, "n", VALUE),
    ({"n": True}, "n", TYPE),
    ({"logprobs": 0}, "logprobs", TYPE),
    ({"top_logprobs": 1}, "top_logprobs", VALUE),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", VALUE),
    ({"logit_bias": {"x": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"-1": 1}}, "logit_bias", VALUE),
    ({"logit_bias": {"256": 1}}, "logit_bias", VALUE),
    ({"response_format": {"type": "xml"}}, "response_format.type", VALUE),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", VALUE),
    (
        {"response_format": SCHEMA, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        VALUE,
    ),
    ({"structured_outputs": {}}, "structured_outputs", VALUE),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", VALUE),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        UNSUPPORTED,
    ),
    ({"store": True}, "store", UNSUPPORTED),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", VALUE),
    ({"continue_final_message": True}, "continue_final_message", VALUE),
    ({"add_generation_prompt": False}, "add_generation_prompt", VALUE),
    ({"return_progress": True}, "return_progress", VALUE),
    ({"temprature": 1}, "temprature", UNKNOWN),
    ({"{braces}": 1}, "{braces}", UNKNOWN),
    ({"x" * 5000: 1}, None, UNKNOWN),
    ({"messages": [{"role": "user", "content": "x" * 400}]}, "messages", None),
    ({"messages": [{"role": "user", "content": "forbidden"}]}, "messages", VALUE),
]


@pytest.mark.parametrize(("fields", "param", "code"), BAD_FIELDS)
def test_bad_fields(
    engine: FakeEngine, http: httpx.Client, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = http.post(CHAT, json={"messages": USER} | fields)
    status = 404 if code == "model_not_found" else 400
    if param is None:
        param = next(iter(fields))
    check(answer, status, param, code or "context_length_exceeded")
    assert engine.requests == []
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


BAD_BODIES = [
    (b"", "invalid_json"),
    (b"{", "invalid_json"),
    (b'{"messages": [}', "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_json"),
    (b"\xff\xfe", "invalid_json"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
    (b'{"temperature": NaN}', "invalid_json"),
    (b'{"temperature": Infinity}', "invalid_json"),
    (b'{"max_tokens": ' + b"9" * 5000 + b"}", "invalid_json"),
    (b"[" * 50_000, "invalid_json"),
    (b'{"a":' * 5000 + b"1" + b"}" * 5000, "invalid_json"),
    (b"[]", TYPE),
    (b'"Hello"', TYPE),
    (b"null", TYPE),
    (b"5", TYPE),
]


@pytest.mark.parametrize(("raw", "code"), BAD_BODIES)
def test_bad_bodies(engine: FakeEngine, http: httpx.Client, raw: bytes, code: str) -> None:
    check(http.post(CHAT, content=raw, headers=JSON), 400, None, code)
    assert engine.requests == []
    assert http.post(CHAT, json={"messages": USER}).status_code == 200


def test_a_number_beyond_float_is_refused(http: httpx.Client) -> None:
    raw = b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}'
    answer = http.post(CHAT, content=raw, headers=JSON)
    check(answer, 400, "temperature", VALUE)


def test_messages_help(http: httpx.Client) -> None:
    def said(**fields: Any) -> str:
        answer = http.post(CHAT, json={"messages": USER} | fields)
        return str(answer.json()["error"]["message"])

    assert said(temprature=1) == 'Unknown field "temprature"; did you mean `temperature`?'
    assert said(temperature="hot") == '`temperature` should be a valid number, not "hot".'
    assert said(max_tokens=0) == (
        "`max_tokens` should be greater than or equal to 1, not 0."
    )
    assert said(messages=[]) == "`messages` should have at least 1 item, not 0."
    assert said(store=True) == "`store` is not supported; only false is accepted."
    assert said(model="llama") == (
        "The model 'llama' is not served here; use 'org/fake-model'."
    )


def test_null_is_absent_and_defaults_ask_for_nothing(http: httpx.Client) -> None:
    optional = set(ChatBody.model_fields) | set(TABLE.refused) | set(TABLE.ignored)
    nulls = dict.fromkeys(optional - {"messages"})
    defaults = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "logprobs": False,
        "top_logprobs": 0,
        "logit_bias": {},
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "store": False,
        "stop": [],
        "user": "ann",
        "metadata": {"a": "b"},
        "service_tier": "auto",
    }
    options = {"stream": True, "stream_options": {"include_usage": None}}
    for fields in (nulls, defaults, options):
        assert http.post(CHAT, json={"messages": USER} | fields).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(http: httpx.Client, kind: str) -> None:
    headers = {"Content-Type": kind}
    answer = http.post(CHAT, content=b'{"messages": []}', headers=headers)
    check(answer, 400, None, "unsupported_media_type")


def test_json_may_name_its_charset(http: httpx.Client) -> None:
    raw = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert http.post(CHAT, content=raw, headers=headers).status_code == 200


def test_paths_and_methods(http: httpx.Client) -> None:
    check(http.get("/v1/nothing"), 404, None, "unknown_url")
    check(http.post("/nothing"), 404, None, "unknown_url")
    check(http.post("/"), 405, None, "method_not_allowed")
    wrong = http.get(CHAT)
    check(wrong, 405, None, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    check(http.delete("/health"), 405, None, "method_not_allowed")
    check(http.get("/v1/models/llama"), 404, "model", "model_not_found")


def test_body_limit_is_exact(http: httpx.Client) -> None:
    raw = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    fits = raw.ljust(MAX_BODY_BYTES)
    assert http.post(CHAT, content=fits, headers=JSON).status_code == 200
    check(
        http.post(CHAT, content=fits + b" ", headers=JSON), 413, None, "request_too_large"
    )
    chunked = http.post(CHAT, content=iter([fits, b" "]), headers=JSON)
    check(chunked, 413, None, "request_too_large")
    assert http.post(CHAT, content=iter([fits]), headers=JSON).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_hundred_megabytes_are_refused_and_the_connection_lives(
    http: httpx.Client, chunked: bool
) -> None:
    block, blocks = b" " * 1_000_000, 100
    headers = JSON if chunked else JSON | {"Content-Length": str(len(block) * blocks)}
    answer = http.post(CHAT, content=(block for _ in range(blocks)), headers=headers)
    check(answer, 413, None, "request_too_large")
    port = answer.extensions["network_stream"].get_extra_info("client_addr")
    after = http.post(CHAT, json={"messages": USER})
    assert after.status_code == 200
    assert after.extensions["network_stream"].get_extra_info("client_addr") == port
    assert after.json()["model"] == INFO.name
