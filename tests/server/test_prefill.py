"""``/v1/prefill`` reads a prompt and writes nothing; its plan does not even read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from fastapi.testclient import TestClient

from mtplx.errors import EngineUnavailableError
from mtplx.server import prefill
from mtplx.types import PrefillForecast, Prompt
from tests.server.conftest import INFO
from tests.server.fakes import FakeEngine, engine_stopped
from tests.server.small_app import small_client

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
CHAT_TOKENS = len("<user>Hello\n<assistant>")
TEXT = {"prompt": "Hello, world", "prompt_cache_key": "mine"}
IDS = {"prompt": [72, 105]}


class PlanningEngine(FakeEngine):
    """Plans on a thread of its own, which waits at ``gate`` as an iteration would.

    Attributes:
        asked: What ``plan`` was asked, and its future.
        lost: It dies before it answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Prompt, str, Future[PrefillForecast]]] = []
        self.lost = False

    def plan(
        self, prompt: Prompt, namespace: str, model: str = ""
    ) -> Future[PrefillForecast]:
        if self.refusal is not None:
            raise self.refusal
        future: Future[PrefillForecast] = Future()
        self.asked.append((prompt, namespace, future))
        threading.Thread(target=self._answer_plan, args=(prompt, future)).start()
        return future

    def _answer_plan(self, prompt: Prompt, future: Future[PrefillForecast]) -> None:
        self.gate.wait()
        if not future.set_running_or_notify_cancel():
            return
        if self.lost:
            future.set_exception(engine_stopped())
            return
        total = len(prompt.token_ids)
        future.set_result(
            PrefillForecast(
                prompt_tokens=total,
                memory_tokens=1,
                disk_tokens=0,
                miss_reason="diverged",
                spans=((1, total - 1), (total - 1, total)),
                edges=prompt.edges,
                snapshots=(total,),
                kv_bytes=total * 100,
                seconds=0.5,
                seconds_error=0.1,
            )
        )


@pytest.fixture
def engine() -> Iterator[PlanningEngine]:
    engine = PlanningEngine()
    yield engine
    engine.open_gate()
    engine.close()


@pytest.fixture
def http(engine: PlanningEngine) -> TestClient:
    return small_client(engine, cache_isolation="prompt-cache-key")


@pytest.mark.parametrize(("body", "tokens"), [(CHAT, CHAT_TOKENS), (TEXT, 12), (IDS, 2)])
def test_a_prompt_is_read_and_nothing_written(
    engine: PlanningEngine, http: TestClient, body: dict[str, Any], tokens: int
) -> None:
    told = http.post("/v1/prefill", json=body).json()
    [request] = engine.requests
    assert (request.max_new_tokens, len(request.prompt.token_ids)) == (0, tokens)
    assert told["usage"]["prompt_tokens"] == told["mtplx"]["new_prefill_tokens"] == tokens
    assert told["usage"]["completion_tokens"] == 0
    again = http.post("/v1/prefill", json=body).json()
    assert again["mtplx"]["cached_tokens"] == tokens - 1
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == tokens - 1


def test_the_namespace_goes_along(engine: PlanningEngine, http: TestClient) -> None:
    http.post("/v1/prefill", json=TEXT)
    http.post("/v1/prefill/plan", json=TEXT)
    http.post("/v1/prefill", json=CHAT)
    assert engine.requests[0].namespace == engine.asked[0][1] != ""
    assert engine.requests[1].namespace == ""


def test_a_plan_is_the_engines_and_reads_nothing(
    engine: PlanningEngine, http: TestClient
) -> None:
    told = http.post("/v1/prefill/plan", json=CHAT).json()
    history = CHAT_TOKENS - len("<assistant>")
    assert told == {
        "object": "prefill.plan",
        "model": INFO.name,
        "prompt_tokens": CHAT_TOKENS,
        "cached_tokens": {"memory": 1, "disk": 0},
        "new_tokens": CHAT_TOKENS - 1,
        "cache_miss_reason": "diverged",
        "stable_prefix_tokens": history,
        "spans": [
            {"start": 1, "end": CHAT_TOKENS - 1},
            {"start": CHAT_TOKENS - 1, "end": CHAT_TOKENS},
        ],
        "edges": [history],
        "snapshots": [CHAT_TOKENS],
        "kv_bytes": CHAT_TOKENS * 100,
        "expected_s": 0.5,
        "expected_error": 0.1,
    }
    assert engine.requests == []


@pytest.mark.parametrize(
    ("longest_s", "fields", "status"),
    [(60.0, {"deadline_s": 0.01}, 408), (0.01, {}, 503), (0.01, {"deadline_s": 60}, 503)],
)
def test_a_busy_engine_is_not_waited_for(
    engine: PlanningEngine,
    http: TestClient,
    monkeypatch: pytest.MonkeyPatch,
    longest_s: float,
    fields: dict[str, float],
    status: int,
) -> None:
    """Whose patience ends says whose fault it is."""
    monkeypatch.setattr(prefill, "PLAN_TIMEOUT_S", longest_s)
    engine.gate.clear()
    answer = http.post("/v1/prefill/plan", json=CHAT | fields)
    assert answer.status_code == status
    assert "busy" in answer.json()["error"]["message"]
    [(_, _, future)] = engine.asked
    assert future.cancelled()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_dead_engine_plans_nothing(
    engine: PlanningEngine, http: TestClient, when: str
) -> None:
    engine.refusal = engine_stopped() if when == "before" else None
    engine.lost = True
    answer = http.post("/v1/prefill/plan", json=CHAT)
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == str(engine_stopped())
    assert isinstance(engine_stopped(), EngineUnavailableError)


@pytest.mark.parametrize("path", ["/v1/prefill", "/v1/prefill/plan"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, 256]}, "prompt[1]"),
        ({"prompt": "a", "model": "other"}, "model"),
        ({"messages": []}, "messages"),
        (CHAT | {"stream": True}, "stream"),
        (CHAT | {"promt": "a"}, "promt"),
    ],
)
def test_what_is_refused(
    http: TestClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_a_prompt_that_is_too_long(http: TestClient) -> None:
    body = {"prompt": "x" * INFO.context_length}
    answer = http.post("/v1/prefill", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
