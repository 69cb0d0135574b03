"""Why a prompt is not the last one's continuation."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic.types import Diagnostics

from mtplx.server.messages.diagnostics import MAX_RECORDS, Record, Records
from mtplx.server.turn import TurnRequest
from tests.server.messages.conftest import Api

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hello to you."}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def ask(api: Api, previous: Any, *, streamed: bool = False, **fields: Any) -> Any:
    body = {
        "model": "claude-any", "max_tokens": 5, "messages": [USER], "system": "Be brief.",
        "diagnostics": {"previous_message_id": previous}, **fields,
    }  # fmt: skip

    async def run() -> Any:
        async with api.sdk() as client:
            if not streamed:
                return await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                return await stream.get_final_message()

    return asyncio.run(run())


def reason(api: Api, previous: Any, **fields: Any) -> Any:
    message = ask(api, previous, **fields)
    if message.diagnostics is None:
        return None
    return Diagnostics.model_validate(message.diagnostics.to_dict()).cache_miss_reason


def test_what_is_another_one_is_told(api: Api) -> None:
    first = ask(api, None)
    assert first.diagnostics is None
    assert reason(api, first.id, messages=[USER, ANSWER, USER]) is None
    assert reason(api, first.id, system="Be long.").type == "system_changed"
    assert reason(api, first.id, tools=[TOOL]).type == "tools_changed"
    other = [{"role": "user", "content": "Hi"}]
    assert reason(api, first.id, messages=other).type == "messages_changed"
    thinking = {"type": "disabled"}
    assert reason(api, first.id, thinking=thinking).type == "unavailable"
    assert reason(api, "msg_unknown").type == "previous_message_not_found"


def test_a_stream_tells_it_too(api: Api) -> None:
    first = ask(api, None, streamed=True)
    assert reason(api, first.id, streamed=True, system="x").type == "system_changed"


def test_an_alias_is_no_other_model(api: Api) -> None:
    first = ask(api, None)
    assert reason(api, first.id, model="claude-other") is None


def test_who_does_not_ask_is_not_told(api: Api) -> None:
    async def run() -> Any:
        async with api.sdk() as client:
            return await client.messages.create(
                model="claude-any", max_tokens=5, messages=[USER]
            )

    assert asyncio.run(run()).diagnostics is None


def record(*texts: str, system: str = "s", prompt_tokens: int = 100) -> Record:
    messages = [{"role": "user", "content": text} for text in texts]
    request = TurnRequest([{"role": "system", "content": system}, *messages])
    return Record.of(request, "fingerprint", prompt_tokens)


def test_missed_tokens_are_those_after_the_change() -> None:
    first = record("a" * 1000, "b" * 1000)
    missed = record("a" * 1000, "c").miss_after(first)
    assert missed is not None
    assert 45 < missed["cache_missed_input_tokens"] < 55
    everything = record("a" * 1000, "b" * 1000, system="t").miss_after(first)
    assert everything == {"type": "system_changed", "cache_missed_input_tokens": 100}


def test_old_records_are_forgotten() -> None:
    records = Records()
    for index in range(MAX_RECORDS + 1):
        records.keep(f"msg_{index}", record("a"))
    forgotten = records.compare(record("a"), "msg_0")
    assert forgotten == {"type": "previous_message_not_found"}
    assert records.compare(record("a"), "msg_1") is None
