"""Completions of text and of token ids."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine

ANSWER = "w0 w1 w2 w3 w4 "


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream, which must end as it should."""
    *chunks, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


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
    assert chunks[0].choices[0].text == ""
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 6 + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert [hasattr(c, "mtplx") for c in chunks] == [False] * 7 + [True]


def test_stream_without_usage(http: httpx.Client) -> None:
    chunks = events(http.post("/v1/completions", json={"prompt": "Hi", "stream": True}))
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
        (["a", ""], "prompt", "invalid_value"),
        (["a", 5], "prompt", "invalid_value"),
        (["a", [1]], "prompt", "invalid_value"),
        ([[1], "a"], "prompt", "invalid_value"),
        ([[1], [2, 256]], "prompt[1][1]", "invalid_value"),
        (["x"] * 65, None, "invalid_value"),
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


def test_a_batch_of_prompts(engine: FakeEngine, openai: OpenAI) -> None:
    answer = openai.completions.create(
        model=INFO.name, prompt=["Hi", "Hello"], n=2, best_of=2, seed=5, max_tokens=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["w0 w1 "] * 4
    assert [bytes(each.prompt.token_ids) for each in engine.requests] == [
        b"Hi",
        b"Hi",
        b"Hello",
        b"Hello",
    ]
    assert [each.sampling.seed for each in engine.requests] == [5, 6, 5, 6]
    assert len({each.request_id for each in engine.requests}) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("HiHello")
    assert answer.usage.completion_tokens == 8


def test_a_streamed_batch(http: httpx.Client) -> None:
    body = {"prompt": [[72], [73]], "stream": True, "echo": True}
    chunks = events(http.post("/v1/completions", json=body))
    texts = ["", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == ["H" + ANSWER, "I" + ANSWER]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:2]] == ["H", "I"]
    ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert ends.count("stop") == 2
    assert ["mtplx" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_logprobs(openai: OpenAI, engine: FakeEngine) -> None:
    engine.answer = ("Ré", "!")
    answer = openai.completions.create(model=INFO.name, prompt="Hi", logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Ré", "!"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 2]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"Ré": -0.5, "?": -1.5, "bytes:\\xff": -2.5}
    assert not engine.requests[-1].prompt_logprobs


def test_logprobs_of_an_echo_begin_with_the_prompt(
    openai: OpenAI, engine: FakeEngine
) -> None:
    prompt = "né"
    answer = openai.completions.create(
        model=INFO.name, prompt=prompt, logprobs=0, echo=True, max_tokens=1
    )
    [choice] = answer.choices
    assert choice.text == "néw0 "
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["n", "bytes:\\xc3", "bytes:\\xa9", "w0 "]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 1, 2]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    assert choice.logprobs.top_logprobs[3] == {"w0 ": -0.5}
    assert engine.requests[-1].prompt_logprobs


def test_streamed_logprobs_are_the_same(http: httpx.Client) -> None:
    body = {"prompt": "Hi", "logprobs": 1, "echo": True}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]
    chunks = events(http.post("/v1/completions", json=body | {"stream": True}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for key, values in whole["logprobs"].items():
        pieces = [choice["logprobs"][key] for choice in choices if choice["logprobs"]]
        assert [value for piece in pieces for value in piece] == values
        assert len(values) == len("Hi") + 5


def test_a_prompt_may_be_scored_alone(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"prompt": [72, 105], "logprobs": 1, "echo": True, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body).json()
    assert engine.requests[-1].max_new_tokens == 0
    [choice] = answer["choices"]
    assert choice["text"] == "Hi"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"best_of": 2}, "best_of", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"echo": 1}, "echo", "invalid_type"),
        ({"max_tokens": -1}, "max_tokens", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
    ],
)
def test_bad_fields(
    http: httpx.Client, fields: dict[str, object], param: str, code: str
) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Hi"} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
