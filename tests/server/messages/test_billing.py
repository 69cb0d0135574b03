"""The one value that is taken out of a prompt, and all that is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mtplx.server.messages.billing import without_check_value
from tests.server.messages.conftest import Api

HEAD = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; "


@pytest.mark.parametrize("value", ["5a0c1", "00000", "F", "0123456789abcdef"])
@pytest.mark.parametrize("rest", [";", "; more=1;", "", "\ntext", ";\ncch=1;"])
def test_the_value_becomes_zeros(value: str, rest: str) -> None:
    text = without_check_value(f"{HEAD}cch={value}{rest}")
    assert text == f"{HEAD}cch=00000{rest}"
    assert without_check_value(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "You are helpful. cch=5a0c1;",
        f"Note: {HEAD}cch=5a0c1;",
        f"\n{HEAD}cch=5a0c1;",
        f"{HEAD}\ncch=5a0c1;",
        f"{HEAD}notcch=5a0c1;",
        f"{HEAD}cch=hello;",
        f"{HEAD}cch=5a0c1x;",
        f"{HEAD}cch=;",
    ],
)
def test_nothing_else_is_touched(text: str) -> None:
    assert without_check_value(text) == text


def ask(api: Api, check_value: str) -> Any:
    async def run() -> Any:
        async with api.sdk() as client:
            return await client.messages.create(
                model="claude-any",
                max_tokens=5,
                messages=[{"role": "user", "content": "Hello"}],
                system=[
                    {"type": "text", "text": f"{HEAD}cch={check_value};"},
                    {"type": "text", "text": "You are Claude Code."},
                ],
            )

    return asyncio.run(run())


def test_prompts_that_differ_in_it_alone_are_one_prompt(api: Api) -> None:
    ask(api, "5a0c1")
    message = ask(api, "beef5")
    assert message.usage.input_tokens == 1
    assert message.model_extra["mtplx"]["billing_header_normalized"] == ["system[0]"]


def test_it_can_be_left_as_it_is() -> None:
    api = Api(normalize_billing_header=False)
    ask(api, "5a0c1")
    message = ask(api, "beef5")
    assert message.usage.input_tokens > 1
    assert "cch=beef5" in api.tokenizer.messages[0]["content"]
    assert "billing_header_normalized" not in message.model_extra["mtplx"]
