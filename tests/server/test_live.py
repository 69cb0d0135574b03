"""``GET /v1/live``: what is told, to whom, and that it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from mtplx.server import live
from mtplx.server.access import RequestRecord
from mtplx.types import LiveIteration
from tests.server.conftest import Server
from tests.server.fakes import ANSWER_TOKENS, INFO, FakeEngine
from tests.server.small_app import small_app

Event = dict[str, Any]
CHAT = {"messages": [{"role": "user", "content": "Hello there"}]}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TICK_S", 0.01)
    monkeypatch.setattr(live, "STATE_S", 0.02)


@contextmanager
def watching(http: httpx.Client, **more: Any) -> Iterator[Callable[[str], Event]]:
    """Yield what returns the next event of a type."""
    with http.stream("GET", "/v1/live", **more) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()

        def following(kind: str) -> Event:
            for line in lines:
                if line.startswith("data: "):
                    event: Event = json.loads(line.removeprefix("data: "))
                    if event["type"] == kind:
                        return event
            raise AssertionError(f"The stream ended before {kind}.")

        yield following


def chat(http: httpx.Client, **more: Any) -> Event:
    answer = http.post("/v1/chat/completions", json=CHAT | more)
    assert answer.status_code == 200
    body: Event = answer.json()
    return body


def test_iterations_come_as_they_happen(server: Server, http: httpx.Client) -> None:
    with watching(http) as following:
        following("state")
        answered = chat(http)
        told = following("iterations")
        iterations = told["iterations"]
        while sum(len(each["decoding"]) for each in iterations) < ANSWER_TOKENS:
            iterations += following("iterations")["iterations"]
    assert told["missed"] == 0
    [span] = iterations[0]["spans"]
    name = answered["id"].removeprefix("chatcmpl-")
    assert span["request_id"] == name
    assert span["end"] == answered["usage"]["prompt_tokens"]
    assert [each["decoding"] for each in iterations[1:]] == [[name]] * ANSWER_TOKENS
    assert iterations[1]["gaps_s"] == [0.003]
    assert iterations[1]["target_s"] == 0.1
    assert 0 <= told["now_s"] - iterations[0]["begin_s"] < 60


def test_open_requests_are_told_while_they_run(
    server: Server, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.gate.clear()
    with watching(http) as following:
        assert following("state")["open"] == []
        with http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}):
            engine.wait_submitted()
            while not (running := following("state")["open"]):
                pass
        [request] = engine.requests
        assert running == [
            {
                "id": request.request_id,
                "model": INFO.name,
                "prompt_tokens": len(request.prompt.token_ids),
                "arrival_s": request.arrival_s,
            }
        ]
        while following("state")["open"]:
            pass


def test_requests_that_ended_are_told_with_their_reason(
    server: Server, http: httpx.Client
) -> None:
    answered = chat(http)
    with watching(http) as following:
        before = following("requests")["requests"]
        mine = before[-1]
        assert answered["id"].endswith(mine["id"])
        for name in ("prompt_tokens", "cached_tokens", "new_prefill_tokens", "ttft_s"):
            assert mine[name] == answered["mtplx"][name]
        assert mine["completion_tokens"] == ANSWER_TOKENS
        assert mine["outcome"] == "stop"
        assert isinstance(mine["why"], str)
        chat(http)
        [later] = following("requests")["requests"]
        assert later["id"] != mine["id"]
        http.get("/health")
        assert following("state")
    assert len(before) <= live.MOST_REQUESTS


def test_the_tree_shows_first_words_only_to_who_may_read_them(
    server: Server, http: httpx.Client, engine: FakeEngine
) -> None:
    chat(http)
    with watching(http) as following:
        [node] = following("bank")["bank"]["nodes"]
    assert node["text"] == "<user>He"
    assert node["model"] == INFO.name
    assert (node["start"], node["end"]) == (0, len(engine.requests[0].prompt.token_ids))
    engine.namespace = "somebody else's"
    with watching(http) as following:
        [node] = following("bank")["bank"]["nodes"]
    assert node["text"] is None


def test_where_everybody_is_let_in_no_words_are_shown() -> None:
    with served(auth=False) as server, client(server) as http:
        chat(http)
        assert texts(http) == [None]


def test_each_key_reads_its_own_words_where_state_is_isolated() -> None:
    with served(api_key="mine,yours", cache_isolation="api-key") as server:
        with client(server, "mine") as http:
            chat(http)
            server.engine.namespace = server.engine.requests[0].namespace
            assert server.engine.namespace
            assert texts(http) == ["<user>He"]
        with client(server, "yours") as http:
            assert texts(http) == [None]


def test_it_needs_a_key() -> None:
    with served(api_key="mine") as server, client(server, "wrong") as http:
        answer = http.get("/v1/live")
        assert answer.status_code == 401
        assert server.engine.sinks == []


def test_nobody_is_recorded_for_after_the_client_left(
    server: Server, http: httpx.Client, engine: FakeEngine
) -> None:
    with watching(http) as following:
        following("state")
        assert len(engine.sinks) == 1
    engine.wait(lambda: not engine.sinks)


def test_a_server_that_stops_ends_the_stream_at_once() -> None:
    with served() as server, client(server) as http:
        with http.stream("GET", "/v1/live") as answer:
            lines = answer.iter_lines()
            next(lines)
            begin_s = time.monotonic()
            server.stop()
            assert all(line is not None for line in lines)
        assert time.monotonic() - begin_s < 2


def test_an_engine_that_is_gone_refuses(
    server: Server, http: httpx.Client, engine: FakeEngine
) -> None:
    engine.alive = False
    assert http.get("/v1/live").status_code == 503


def test_who_is_too_slow_is_told_what_it_missed() -> None:
    iterations = live._Iterations()
    for number in range(live.MOST_ITERATIONS + 3):
        iterations(iteration(number))
    taken, missed = iterations.take()
    assert (len(taken), missed, taken[0].number) == (live.MOST_ITERATIONS, 3, 3)
    iterations(iteration(1))
    assert iterations.take() == ([iteration(1)], 0)


def test_only_the_last_requests_are_remembered() -> None:
    recent = live.RecentRequests()
    for number in range(live.MOST_REQUESTS + 2):
        recent.observe(RequestRecord(request_id=str(number), model="m"))
    recent.observe(RequestRecord(request_id="no model's"))
    assert [each["id"] for each in recent.after(recent.count - 2)] == ["50", "51"]
    assert len(recent.after(0)) == live.MOST_REQUESTS
    assert recent.after(recent.count) == []


def test_the_document_tells_the_events() -> None:
    engine = FakeEngine()
    document = small_app(engine).openapi()
    engine.close()
    content = document["paths"]["/v1/live"]["get"]["responses"]["200"]["content"]
    assert "LiveEvent" in str(content["text/event-stream"])
    told = document["components"]["schemas"]
    assert set(told["LiveEvent"]["properties"]["type"]["enum"]) == {
        "state",
        "iterations",
        "bank",
        "requests",
    }
    assert {"LiveIteration", "LiveBankNode", "LiveRequest"} <= set(told)


@contextmanager
def served(**settings: Any) -> Iterator[Server]:
    server = Server(**settings)
    try:
        yield server
    finally:
        server.stop()


def client(server: Server, key: str = "none") -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=10, trust_env=False)


def texts(http: httpx.Client) -> list[str | None]:
    with watching(http) as following:
        return [node["text"] for node in following("bank")["bank"]["nodes"]]


def iteration(number: int) -> LiveIteration:
    return LiveIteration(number, "m", 0, 0, None, (), (), (), None, 0, "")
