"""Several answers, log probabilities, aliases and breakpoints of chats."""

from __future__ import annotations

import json

import httpx
from openai import OpenAI

from mtplx.errors import GenerationError
from mtplx.types import Failed
from tests.server.conftest import INFO, Server
from tests.server.fakes import ANSWER, FakeEngine

USER = [{"role": "user", "content": "Hello"}]
TEXT = "".join(ANSWER)
PROMPT_TOKENS = len("<user>Hello\n<assistant>")


def test_n_answers_to_one_prompt(engine: FakeEngine, openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=INFO.name, messages=USER, n=3, seed=2**63 - 1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == PROMPT_TOKENS
    assert answer.usage.completion_tokens == 15
    assert answer.usage.total_tokens == PROMPT_TOKENS + 15
    first, *others = engine.requests
    assert len(others) == 2
    assert [each.sampling.seed for each in engine.requests] == [
        2**63 - 1,
        2**63,
        2**63 + 1,
    ]
    assert len({each.request_id for each in engine.requests}) == 3
    assert all(each.prompt == first.prompt for each in others)
    reports = answer.mtplx["choices"]  # type: ignore[attr-defined]
    assert [report["prompt_tokens"] for report in reports] == [PROMPT_TOKENS] * 3


def test_n_streamed_answers(openai: OpenAI) -> None:
    chunks = list(
        openai.chat.completions.create(
            model=INFO.name,
            messages=USER,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = ["", ""]
    ends = []
    for chunk in chunks[:-1]:
        [choice] = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends += [(choice.index, choice.finish_reason)] if choice.finish_reason else []
    assert texts == [TEXT, TEXT]
    assert sorted(ends) == [(0, "stop"), (1, "stop")]
    assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == PROMPT_TOKENS
    assert chunks[-1].usage.completion_tokens == 10
    assert [hasattr(chunk, "mtplx") for chunk in chunks] == [False] * (len(chunks) - 1) + [
        True
    ]


def test_a_client_that_goes_away_ends_all_answers(
    engine: FakeEngine, http: httpx.Client
) -> None:
    engine.gate.clear()
    body = {"messages": USER, "n": 2, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert next(stream.iter_lines())
    engine.wait_idle()
    assert len(engine.ended) == 2


def test_one_failure_ends_all_answers(engine: FakeEngine, http: httpx.Client) -> None:
    engine.failure = Failed(GenerationError("The logits are not numbers."))
    answer = http.post("/v1/chat/completions", json={"messages": USER, "n": 2})
    assert answer.status_code == 500
    engine.wait_idle()
    ends = list(engine.ended.values())
    assert ends[0] is engine.failure
    assert len(ends) == 2


def test_a_full_queue_leaves_nothing_submitted(
    engine: FakeEngine, http: httpx.Client
) -> None:
    engine.gate.clear()
    engine.room = 2
    answer = http.post("/v1/chat/completions", json={"messages": USER, "n": 3})
    assert answer.status_code == 429
    engine.wait_idle()
    assert [end.reason for end in engine.ended.values()] == ["cancelled"] * 2  # type: ignore[union-attr]


def test_logprobs(openai: OpenAI, engine: FakeEngine) -> None:
    engine.answer = ("Ré", "!")
    answer = openai.chat.completions.create(
        model=INFO.name, messages=USER, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [each.token for each in content] == ["Ré", "!"]
    assert content[0].bytes == list("Ré".encode())
    assert [each.logprob for each in content] == [-0.5, -0.5]
    assert [each.token for each in content[0].top_logprobs] == ["Ré", "?", "�"]
    assert content[0].top_logprobs[2].bytes == [255]
    assert engine.requests[-1].logprobs == 3


def test_streamed_logprobs_are_the_same(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"messages": USER, "logprobs": True, "top_logprobs": 1}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    text = http.post("/v1/chat/completions", json=body | {"stream": True}).text
    chunks = [json.loads(e.removeprefix("data: ")) for e in text.split("\n\n")[:-2]]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [piece for each in pieces if each for piece in each["content"]] == whole[
        "content"
    ]
    assert whole["refusal"] is None
    assert len(whole["content"]) == len(ANSWER)


def test_no_logprobs_without_asking(http: httpx.Client, engine: FakeEngine) -> None:
    http.post("/v1/chat/completions", json={"messages": USER, "logprobs": False})
    assert engine.requests[-1].logprobs is None


def test_aliases_are_served_under_the_real_name(openai: OpenAI) -> None:
    for name in ("gpt-4o-mini", "claude-opus-4-1", INFO.name):
        answer = openai.chat.completions.create(model=name, messages=USER)
        assert answer.model == INFO.name


def test_nobody_has_a_namespace_by_default(engine: FakeEngine, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": USER, "prompt_cache_key": "a"})
    assert engine.requests[-1].namespace == ""


def test_logprobs_are_those_of_the_text(openai: OpenAI, engine: FakeEngine) -> None:
    engine.answer = ("<think>", "hm", "</think>", "Ha", "!", "<call f>", "{}", "</call>")
    answer = openai.chat.completions.create(model=INFO.name, messages=USER, logprobs=True)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [each.token for each in content] == ["Ha", "!"]


def test_breakpoints_are_edges(server: Server, http: httpx.Client) -> None:
    marks = [{"cache_control": {"type": "ephemeral"}}, {"prompt_cache_breakpoint": {}}, {}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": str(n)} | marks[n % 3]]}
        for n in range(9)
    ]
    http.post("/v1/chat/completions", json={"messages": messages})
    assert server.tokenizer.edge_after == (3, 4, 6, 7)
