"""What an agent and a restart cost: the real server, the real model, the real SDK."""

from __future__ import annotations

from tests.scenarios.served import served

SYSTEM = {
    "role": "system",
    "content": "You are a patient weather clerk. Look the weather up before you say "
    "anything about it, one city at a time, and never guess. Answer in one short "
    "sentence, in plain words, without lists. If a city is unknown, say so.",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(server, messages, **more):
    return server.client.chat.completions.create(
        model=server.model, messages=messages, temperature=0, **more
    )


def answer_of(completion):
    return completion.choices[0].message.model_dump(exclude_none=True)


def test_ten_rounds_of_a_tool_loop_compute_only_what_is_new(server):
    messages = [SYSTEM, {"role": "user", "content": "How is the weather everywhere?"}]
    known = 0
    for number in range(10):
        turn = ask(
            server,
            messages,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            parallel_tool_calls=False,
            max_tokens=64,
        )
        metrics = turn.mtplx
        if known:
            new_tokens = turn.usage.prompt_tokens - known
            assert 0 < new_tokens < 100
            assert metrics["new_prefill_tokens"] <= new_tokens + 32
            assert metrics["cache_miss_reason"] is None
        known = turn.usage.total_tokens
        (call,) = turn.choices[0].message.tool_calls
        messages += [
            answer_of(turn),
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": f"{number + 10} degrees and windy.",
            },
        ]


def test_a_conversation_goes_on_after_a_restart(demo_folder, tmp_path, cold_server):
    messages = [SYSTEM, {"role": "user", "content": "What is the capital of France?"}]
    with served("demo", "--kv-disk", str(tmp_path)) as server:
        first = ask(server, messages, max_tokens=16)
        assert server.interrupt() == 0
    messages += [answer_of(first), {"role": "user", "content": "And of Italy?"}]
    with served("demo", "--kv-disk", str(tmp_path)) as server:
        again = ask(server, messages, max_tokens=16)
        assert server.health()["engine"]["disk"]["hits"] == 1
    metrics = again.mtplx
    assert metrics["cache_source"] == "disk"
    assert metrics["cached_tokens"] >= first.usage.prompt_tokens
    assert metrics["new_prefill_tokens"] < 32
    cold = ask(cold_server, messages, max_tokens=16)
    assert cold.mtplx["cached_tokens"] == 0
    assert answer_of(again) == answer_of(cold)
