"""What a newcomer does: talk to the demo model through the OpenAI SDK."""

from __future__ import annotations

import pytest

from tests.test_readme import example_with

QUESTION = {"role": "user", "content": "What is the capital of France? Answer briefly."}


def ask(server, messages, **more):
    return server.client.chat.completions.create(
        model=server.model, messages=messages, temperature=0, **more
    )


def text_of(completion):
    return completion.choices[0].message.content


def test_it_knows_the_capital_of_france_and_streams_the_same_text(server):
    whole = ask(server, [QUESTION])
    assert "Paris" in text_of(whole)
    assert whole.choices[0].finish_reason == "stop"
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens

    chunks = list(
        ask(server, [QUESTION], stream=True, stream_options={"include_usage": True})
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == text_of(whole)
    assert len([piece for piece in pieces if piece]) > 3
    last = chunks[-1]
    assert last.choices == []
    assert last.usage.completion_tokens == usage.completion_tokens
    assert last.mtplx["prompt_tokens"] == usage.prompt_tokens


def test_the_second_turn_computes_only_what_is_new(server, cold_server):
    first = ask(server, [QUESTION])
    messages = [
        QUESTION,
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And of Germany?"},
    ]
    second = ask(server, messages)
    metrics = second.mtplx
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert metrics["new_prefill_tokens"] == second.usage.prompt_tokens - known
    assert metrics["new_prefill_tokens"] <= 24
    assert metrics["cached_tokens"] == known
    assert second.usage.prompt_tokens_details.cached_tokens == known
    assert metrics["cache_source"] == "memory"

    cold = ask(cold_server, messages)
    assert cold.mtplx["cached_tokens"] == 0
    assert cold.mtplx["cache_miss_reason"] == "disabled"
    assert text_of(second) == text_of(cold)


def test_two_conversations_that_share_a_beginning_stay_apart(server, cold_server):
    system = {"role": "system", "content": "You are a geography teacher. Be brief."}
    talks = [
        [system, {"role": "user", "content": f"What is the capital of {country}?"}]
        for country in ("Spain", "Italy")
    ]
    answers = [ask(server, talk, max_tokens=8) for talk in talks]
    assert answers[1].mtplx["cached_tokens"] > 20
    for turn in range(2):
        for talk, answer in zip(talks, answers, strict=True):
            talk += [
                {"role": "assistant", "content": text_of(answer)},
                {"role": "user", "content": f"Tell me fact number {turn + 1} about it."},
            ]
        answers = [ask(server, talk, max_tokens=8) for talk in talks]
        for talk, answer in zip(talks, answers, strict=True):
            assert answer.mtplx["cached_tokens"] > 20
            assert text_of(answer) == text_of(ask(cold_server, talk, max_tokens=8))


def test_a_plain_completion_keeps_its_leading_space(server):
    answer = server.client.completions.create(
        model=server.model, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.choices[0].finish_reason == "length"
    pieces = server.client.completions.create(
        model=server.model,
        prompt="The capital of France is",
        temperature=0,
        max_tokens=4,
        stream=True,
    )
    assert "".join(p.choices[0].text for p in pieces) == answer.choices[0].text


def test_a_stop_string_ends_the_answer_and_does_not_leak(server):
    answer = ask(server, [QUESTION], stop=["ari"])
    assert text_of(answer) == "The capital of France is P"
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_repeats(server):
    def sampled(seed):
        return text_of(
            server.client.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": "Write a line about the sea."}],
                temperature=1.0,
                seed=seed,
                max_tokens=12,
            )
        )

    assert sampled(7) == sampled(7)
    assert len({sampled(seed) for seed in (7, 8, 9)}) > 1


def test_the_model_list_tells_the_context(server):
    (model,) = server.client.models.list().data
    assert model.context_length == 8192
    assert server.client.models.retrieve(model.id).id == model.id


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty"])
def test_penalties_change_a_repetitive_answer(server, penalty):
    messages = [{"role": "user", "content": "Repeat the word yes twenty times."}]
    plain = text_of(ask(server, messages, max_tokens=24))
    assert text_of(ask(server, messages, max_tokens=24, **{penalty: 2.0})) != plain


def test_the_client_example_of_the_readme(server, capsys):
    code = example_with("from openai import OpenAI")
    exec(code.replace("http://127.0.0.1:8000", server.url), {})
    answer, numbers = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "Paris" in answer
    cached, ttft_s = numbers.split()
    assert int(cached) >= 0
    assert float(ttft_s) > 0
