"""Every body and every event is what the SDK's own models, and our OpenAPI document, say
it is. The SDK's clients do not check that; here they are made to."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from mtplx.server import chat_shapes, completion_answer
from tests.server.fakes import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
ANSWER = ("<think>", "hm", "</think>", "Ha", "!", "<call f>", "{}", "</call>")
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": USER}),
    (CHAT, {"messages": USER, "tools": [TOOL], "n": 2}),
    (CHAT, {"messages": USER, "max_tokens": 1}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 3}),
    (TEXT, {"prompt": "Hi"}),
    (TEXT, {"prompt": ["Hi", "Ho"], "n": 2, "logprobs": 3, "echo": True}),
    (TEXT, {"prompt": [72], "max_tokens": 0, "echo": True}),
]
MODELS: dict[str, tuple[type[BaseModel], Any]] = {
    CHAT: (ChatCompletion, chat_shapes.ChatCompletion),
    TEXT: (Completion, completion_answer.TextCompletion),
}
CHUNKS: dict[str, tuple[type[BaseModel], Any]] = {
    CHAT: (ChatCompletionChunk, chat_shapes.ChatCompletionChunk),
    TEXT: (Completion, completion_answer.TextCompletion),
}


def check(body: Any, models: tuple[type[BaseModel], Any]) -> None:
    """Assert that ``body`` is both, and has nothing that ours does not declare."""
    theirs, ours = models
    assert TypeAdapter(ours).validate_python(body, strict=True) == body
    if theirs is Completion:
        for choice in body["choices"]:
            # Their one model of wholes and chunks knows neither a chunk that is not the
            # last, nor that the first token of a prompt has no probability.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
            for key, nothing in (("token_logprobs", 0.0), ("top_logprobs", {})):
                if choice["logprobs"] and choice["logprobs"][key][:1] == [None]:
                    choice["logprobs"][key][0] = nothing
    theirs.model_validate_json(json.dumps(body), strict=True)


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_a_whole_answer(
    engine: FakeEngine, http: httpx.Client, path: str, fields: dict[str, Any]
) -> None:
    engine.answer = ANSWER
    answer = http.post(path, json=fields)
    assert answer.status_code == 200
    check(answer.json(), MODELS[path])


@pytest.mark.parametrize(("path", "fields"), CASES)
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream(
    engine: FakeEngine,
    http: httpx.Client,
    path: str,
    fields: dict[str, Any],
    options: dict[str, Any],
) -> None:
    engine.answer = ANSWER
    body = fields | options | {"stream": True, "return_progress": True}
    *events, done, rest = http.post(path, json=body).text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert len(events) > 2
    for event in events:
        check(json.loads(event.removeprefix("data: ")), CHUNKS[path])
