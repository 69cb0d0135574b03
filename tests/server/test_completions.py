"""Completions of text and of token ids."""

from __future__ import annotations

import json

import httpx
import pytest
from openai import OpenAI

from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine

ANSWER = "w0 w1 w2 w3 w4 "


@pytest.mark.parametrize("prompt", ["Hi", ["Hi"], [72, 105], [[72, 105]]])
def test_the_four_spellings_of_one_prompt(
    engine: FakeEngine, openai: OpenAI, prompt: object
) -> None:
    answer = openai.completions.create(model=INFO.name, prompt=prompt)  # type: ignore[call-overload]
    assert answer.choices[0].text == ANSWER
    assert answer.usage.prompt_tokens == 2
    assert engine.requests[-1].prompt.token_ids == (72, 105)


def test_token_ids_are_a_stable_prefix(engine: FakeEngine, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": [72, 105, 33]})
    assert engine.requests[-1].prompt.stable_prefix_len == 3


def test_whole_answer_has_exactly_these_keys(http: httpx.Client) -> None:
    body = http.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("mtplx")["prompt_tokens"] == 2
    assert body.pop("usage")["total_tokens"] == 3
    assert body == {
        "object": "text_completion",
        "model": INFO.name,
        "choices": [
            {"index": 0, "text": "w0 ", "logprobs": None, "finish_reason": "length"}
        ],
        "system_fingerprint": "fp_0123456789ab",
    }


def test_stream(openai: OpenAI) -> None:
    chunks = list(
        openai.completions.create(
            model=INFO.name,
            prompt="Hi",
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks[:-1]) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 5 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert [hasattr(c, "mtplx") for c in chunks] == [False] * 6 + [True]


def test_stream_without_usage(http: httpx.Client) -> None:
    text = http.post("/v1/completions", json={"prompt": "Hi", "stream": True}).text
    chunks = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    assert not any("usage" in chunk for chunk in chunks)
    assert chunks[-1]["mtplx"]["prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("prompt", "param", "code"),
    [
        ("", "prompt", "invalid_value"),
        ([], "prompt", "invalid_value"),
        ([""], "prompt", "invalid_value"),
        (5, "prompt", "invalid_value"),
        ({"a": 1}, "prompt", "invalid_value"),
        (None, "prompt", "missing_required_parameter"),
        (["a", "b"], "prompt", "unsupported_parameter"),
        ([[1], [2]], "prompt", "unsupported_parameter"),
        ([1, 256], "prompt[1]", "invalid_value"),
        ([-1], "prompt[0]", "invalid_value"),
        ([True], "prompt[0]", "invalid_value"),
        ([1, "a"], "prompt[1]", "invalid_value"),
        ([1.0], "prompt[0]", "invalid_value"),
        ("x" * 400, "prompt", "context_length_exceeded"),
        ([1] * 400, "prompt", "context_length_exceeded"),
    ],
)
def test_bad_prompts(http: httpx.Client, prompt: object, param: str, code: str) -> None:
    answer = http.post("/v1/completions", json={"prompt": prompt})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert http.post("/v1/completions", json={"prompt": "Hi"}).status_code == 200


def test_the_longest_prompt_leaves_one_token(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x" * 399}).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
