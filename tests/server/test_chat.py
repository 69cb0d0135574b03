"""Chats through the real OpenAI SDK."""

from __future__ import annotations

import json
import logging

import httpx
import openai as sdk
import pytest
from openai import OpenAI

from mtplx.errors import GenerationError
from mtplx.types import Failed, SamplingParams
from tests.server.conftest import INFO, Server
from tests.server.fakes import FakeEngine, engine_stopped, queue_full

USER = [{"role": "user", "content": "Hello"}]
ANSWER = "w0 w1 w2 w3 w4 "
PROMPT_TOKENS = len("<user>Hello\n<assistant>")


def test_whole_answer(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model=INFO.name, messages=USER)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == PROMPT_TOKENS + 5


def test_whole_answer_has_exactly_these_keys(http: httpx.Client) -> None:
    body = http.post("/v1/chat/completions", json={"messages": USER}).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    metrics = body.pop("mtplx")
    assert body == {
        "object": "chat.completion",
        "model": INFO.name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": 5,
            "total_tokens": PROMPT_TOKENS + 5,
            "prompt_tokens_details": {
                "cached_tokens": metrics["cached_tokens"],
                "audio_tokens": 0,
            },
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "system_fingerprint": "fp_0123456789ab",
    }
    assert metrics["cached_tokens"] + metrics["new_prefill_tokens"] == PROMPT_TOKENS


def test_cached_tokens_reach_usage(openai: OpenAI) -> None:
    openai.chat.completions.create(model=INFO.name, messages=USER)
    again = openai.chat.completions.create(model=INFO.name, messages=USER)
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == PROMPT_TOKENS - 1
    assert again.mtplx["new_prefill_tokens"] == 1  # type: ignore[attr-defined]


def test_stream_joins_to_the_whole_answer(openai: OpenAI) -> None:
    chunks = list(
        openai.chat.completions.create(model=INFO.name, messages=USER, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    deltas = [chunk.choices[0].delta.content for chunk in chunks[1:-1]]
    assert "".join(deltas) == ANSWER  # type: ignore[arg-type]
    assert all(deltas)
    last = chunks[-1]
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].delta.content is None
    assert last.usage is None
    assert last.mtplx["prompt_tokens"] == PROMPT_TOKENS  # type: ignore[attr-defined]
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_chunk(http: httpx.Client) -> None:
    body = {
        "messages": USER,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 2,
    }
    answer = http.post("/v1/chat/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * 4 + [False]
    assert chunks[-2]["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    ]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert ["mtplx" in chunk for chunk in chunks] == [False] * 4 + [True]


def test_stream_headers(http: httpx.Client) -> None:
    body = {"messages": USER, "stream": True}
    headers = http.post("/v1/chat/completions", json=body).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert len(headers["x-request-id"]) == 32


def test_first_chunk_comes_before_the_first_token(
    engine: FakeEngine, openai: OpenAI
) -> None:
    engine.gate.clear()
    stream = iter(
        openai.chat.completions.create(model=INFO.name, messages=USER, stream=True)
    )
    assert next(stream).choices[0].delta.role == "assistant"
    engine.open_gate()
    assert next(stream).choices[0].delta.content == "w0 "
    assert len(list(stream)) == 5


def test_every_honoured_field_reaches_the_engine(
    server: Server, http: httpx.Client
) -> None:
    body = {
        "model": INFO.name,
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "name": "ann",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "c"},
        ],
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "min_p": 0.1,
        "seed": -7,
        "repetition_penalty": 1.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": {"5": -100, "6": 1.5},
        "stop": ["x", "y"],
        "max_completion_tokens": 3,
        "max_tokens": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    [request] = server.engine.requests
    assert answer.json()["id"] == f"chatcmpl-{request.request_id}"
    assert answer.headers["x-request-id"] == request.request_id
    assert request.max_new_tokens == 3
    assert request.stop == ("x", "y")
    assert request.sampling == SamplingParams(
        temperature=0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        seed=-7,
        repetition_penalty=1.1,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias=((5, -100), (6, 1.5)),
    )
    assert server.tokenizer.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab", "name": "ann"},
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "c"},
    ]
    assert server.tokenizer.template_kwargs == {"enable_thinking": False}


def test_answer_is_limited_by_the_room_left(engine: FakeEngine, http: httpx.Client) -> None:
    room = INFO.context_length - PROMPT_TOKENS
    for limit, expected in ((None, room), (10**30, room), (room, room), (1, 1)):
        body = {"messages": USER, "max_tokens": limit}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert engine.requests[-1].max_new_tokens == expected


def test_typed_exceptions(engine: FakeEngine, openai: OpenAI) -> None:
    with pytest.raises(sdk.BadRequestError) as bad:
        openai.chat.completions.create(model=INFO.name, messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(sdk.NotFoundError, match="org/fake-model") as missing:
        openai.chat.completions.create(model="llama", messages=USER)
    assert missing.value.code == "model_not_found"
    long = [{"role": "user", "content": "x" * INFO.context_length}]
    with pytest.raises(sdk.BadRequestError, match="maximum context length is 400") as full:
        openai.chat.completions.create(model=INFO.name, messages=long)
    assert full.value.code == "context_length_exceeded"
    huge = [{"role": "user", "content": "x" * 100_000}]
    with pytest.raises(sdk.APIStatusError) as large:
        openai.chat.completions.create(model=INFO.name, messages=huge)
    assert large.value.status_code == 413
    assert engine.requests == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_an_http_status(
    engine: FakeEngine, openai: OpenAI, stream: bool
) -> None:
    engine.refusal = queue_full()
    with pytest.raises(sdk.RateLimitError) as full:
        openai.chat.completions.create(model=INFO.name, messages=USER, stream=stream)
    assert full.value.response.headers["retry-after"] == "2"
    engine.refusal = engine_stopped()
    with pytest.raises(sdk.InternalServerError) as stopped:
        openai.chat.completions.create(model=INFO.name, messages=USER, stream=stream)
    assert stopped.value.status_code == 503


def test_a_failure_before_the_answer_is_a_status(
    engine: FakeEngine, http: httpx.Client
) -> None:
    engine.failure = Failed(GenerationError("The logits are not numbers."))
    answer = http.post("/v1/chat/completions", json={"messages": USER})
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "The logits are not numbers.",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }


def test_a_failure_in_a_stream_is_its_last_event(
    engine: FakeEngine, openai: OpenAI
) -> None:
    engine.failure = Failed(GenerationError("The logits are not numbers."))
    stream = openai.chat.completions.create(model=INFO.name, messages=USER, stream=True)
    chunks = iter(stream)
    assert [next(chunks).choices[0].delta.content for _ in range(2)] == ["", "w0 "]
    with pytest.raises(sdk.APIError, match="not numbers"):
        next(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_shows_no_traceback(
    engine: FakeEngine,
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
) -> None:
    engine.refusal = ZeroDivisionError("secret")
    answer = http.post("/v1/chat/completions", json={"messages": USER, "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"]
    assert "ZeroDivisionError: secret" in caplog.text


def test_one_log_line_without_the_prompt(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mtplx.server"):
        answers = [
            http.post("/v1/chat/completions", json={"messages": USER}),
            http.post("/v1/chat/completions", json={"messages": USER, "stream": True}),
            http.get("/nothing%0Ahere"),
        ]
        http.get("/health")  # on the same connection: the lines before it are written
    lines = [r.getMessage() for r in caplog.records if r.name == "mtplx.server"]
    own = [
        [line for line in lines if answer.headers["x-request-id"] in line]
        for answer in answers
    ]
    assert [len(each) for each in own] == [1, 1, 1]
    for [line] in own[:2]:
        assert "path=/v1/chat/completions status=200 model=org/fake-model" in line
        assert "outcome=stop" in line
        assert f"prompt={PROMPT_TOKENS} cached=" in line
        assert "completion=5 ttft=" in line
    assert "path=/nothing%0Ahere status=404 total=" in own[2][0]
    assert "Hello" not in caplog.text
