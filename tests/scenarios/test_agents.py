"""Agent frameworks complete a loop with two tools against the real server.

The demo model is too small to choose a tool by itself: each step of a loop is told which
tool to call, or to answer, then in letters: the model would imitate the calls before. All
the rest is the framework's and the server's: tools in, calls out, results back, an end.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

AI_SDK = Path(__file__).with_name("ai_sdk")


class Report(BaseModel):
    sky: Literal["sunny", "grey"]
    late: bool


def must_call(tool):
    return {"tool_choice": [tool], "parallel_tool_calls": False}


WORDS = {
    "tool_choice": "none",
    "extra_body": {"structured_outputs": {"regex": "[A-Z][a-z ]{9,29}[.]"}},
}


def two_tool_agent(model, last_step, output_type):
    """An agent, and the list to which its tools write that they ran."""
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")
    steps = [must_call("weather"), must_call("clock"), last_step]
    agent = pydantic_ai.Agent(
        model,
        output_type=output_type,
        model_settings=lambda context: {
            "temperature": 0,
            "max_tokens": 40,
            "timeout": 120,
            # Steps are counted from 1.
            **steps[context.run_step - 1],
        },
    )
    ran = []

    @agent.tool_plain
    def weather(city: Literal["Rome", "Oslo"]) -> str:
        """Weather of a city."""
        ran.append(("weather", city))
        return "sunny"

    @agent.tool_plain
    def clock(zone: Literal["UTC", "CET"]) -> str:
        """Time in a zone."""
        ran.append(("clock", zone))
        return "noon"

    return agent, ran


def assert_both_ran(ran):
    (weather, city), (clock, zone) = ran
    assert (weather, clock) == ("weather", "clock")
    assert city in ("Rome", "Oslo")
    assert zone in ("UTC", "CET")


def test_pydantic_ai_over_chat_completions(server):
    models = pytest.importorskip(
        "pydantic_ai.models.openai", reason="pydantic-ai is not installed"
    )
    providers = pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = models.OpenAIChatModel(server.model, provider=provider)
    agent, ran = two_tool_agent(model, WORDS, str)
    run = agent.run_sync("What are the weather and the time?")
    assert_both_ran(ran)
    assert re.fullmatch("[A-Z][a-z ]+[.]", run.output)
    assert run.usage.requests == 3
    assert run.usage.tool_calls == 2
    assert run.usage.cache_read_tokens > 0


def test_pydantic_ai_over_messages_with_a_structured_answer(server):
    """Its answer is a third tool, which ends the run when its arguments are valid."""
    models = pytest.importorskip(
        "pydantic_ai.models.anthropic", reason="pydantic-ai is not installed"
    )
    providers = pytest.importorskip("pydantic_ai.providers.anthropic")
    provider = providers.AnthropicProvider(base_url=server.url, api_key="none")
    model = models.AnthropicModel(server.model, provider=provider)
    agent, ran = two_tool_agent(model, must_call("final_result"), Report)
    run = agent.run_sync("What are the weather and the time?")
    assert_both_ran(ran)
    assert isinstance(run.output, Report)
    assert run.usage.requests == 3


def test_the_ai_sdk_on_node(server):
    node = shutil.which("node")
    if node is None or not (AI_SDK / "node_modules").is_dir():
        pytest.skip("needs Node and `npm install` in tests/scenarios/ai_sdk")
    done = subprocess.run(
        [node, "loop.mjs", f"{server.url}/v1", server.model],
        cwd=AI_SDK,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["steps"][:2] == [
        {"reason": "tool-calls", "calls": ["weather"], "results": ["sunny"]},
        {"reason": "tool-calls", "calls": ["clock"], "results": ["noon"]},
    ]
    (last,) = said["steps"][2:]
    assert last["calls"] == []
    weather, clock = said["ran"]
    assert weather["city"] in ("Rome", "Oslo")
    assert clock["zone"] in ("UTC", "CET")
    assert re.fullmatch("[A-Z][a-z ]+[.]", said["text"])
    streamed = said["streamed"]
    assert "".join(streamed["pieces"]) == "The capital of France is Paris."
    assert len(streamed["pieces"]) > 3
    assert streamed["reason"] == "stop"
    assert streamed["outputTokens"] == 8
