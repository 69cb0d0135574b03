"""``/v1/prefill`` and ``/v1/prefill/plan``: read a prompt, or say what that would take.

Both take the body of a chat or of a completion, told apart by ``messages``, so that a
client sends what it will send anyway; what it says about the answer has no effect. The
plan is the engine's own: it is asked for between two iterations, and nothing is read,
restored or pinned for it. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from fastapi import FastAPI, Request, Response
from typing_extensions import TypedDict

from mtplx.errors import (
    DeadlineExceededError,
    EngineUnavailableError,
    MtplxError,
    UnsupportedFieldError,
)
from mtplx.server.access import RequestRecord
from mtplx.server.body import read_object, validate
from mtplx.server.chat_body import ChatBody
from mtplx.server.completion_body import CompletionBody
from mtplx.server.completions import text_prompt
from mtplx.server.openapi import describe
from mtplx.server.responses import Usage, json_response, report, usage
from mtplx.server.service import Service
from mtplx.server.turn import render
from mtplx.types import Finished, GenerationRequest, PrefillForecast, Prompt

PLAN_TIMEOUT_S = 10.0
"""The longest iteration that a plan waits for."""


class Prefilled(TypedDict):
    """Answer of ``POST /v1/prefill``. ``mtplx`` is a ``PrefillMetrics``."""

    object: str
    model: str
    usage: Usage
    mtplx: dict[str, Any]


class CachedTokens(TypedDict):
    """Tokens whose state would be restored, by where it is."""

    memory: int
    disk: int


class PlannedSpan(TypedDict):
    """The half-open range of the prompt that one step would compute."""

    start: int
    end: int


class Plan(TypedDict):
    """Answer of ``POST /v1/prefill/plan``; see ``PrefillForecast``. The prompt's tokens
    are those cached and the new ones. ``expected_s`` is off by ``expected_error`` times
    itself, usually; both are null before anything was measured."""

    object: str
    model: str
    prompt_tokens: int
    cached_tokens: CachedTokens
    new_tokens: int
    cache_miss_reason: str | None
    stable_prefix_tokens: int
    spans: list[PlannedSpan]
    edges: list[int]
    snapshots: list[int]
    kv_bytes: int
    expected_s: float | None
    expected_error: float | None


class _Asked(NamedTuple):
    service: Service  # Of the model that is to read it.
    prompt: Prompt
    namespace: str
    param: str  # The field that the prompt came from.
    within_s: float | None  # When the client gives up.


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.post("/v1/prefill", **describe(ChatBody, Prefilled, CompletionBody))
    async def prefill(request: Request) -> Response:
        """Read a prompt and keep its state, so that the same one starts at once."""
        asked = await _read(service, request)
        return json_response(await _prefill(request, asked))

    @app.post("/v1/prefill/plan", **describe(ChatBody, Plan, CompletionBody))
    async def plan(request: Request) -> Response:
        """Tell what reading a prompt would take, without doing it."""
        asked = await _read(service, request)
        return json_response(_plan(asked, await _forecast(asked)))


async def _read(service: Service, request: Request) -> _Asked:
    settings = service.configuration.settings
    value = await read_object(request, max_bytes=settings.max_body_bytes)
    body: ChatBody | CompletionBody
    if "messages" in value:
        body = validate(value, ChatBody)
    else:
        body = validate(value, CompletionBody)
    if body.stream:
        raise UnsupportedFieldError(
            "Nothing is streamed here; leave `stream` out.", param="stream"
        )
    service = await service.for_model(body.model)
    namespace = service.namespace(request, body.prompt_cache_key)
    if isinstance(body, ChatBody):
        turn = await asyncio.to_thread(body.turn, namespace)
        prompt, param = await asyncio.to_thread(render, service, turn), "messages"
    elif len(body.prompt) > 1:
        raise UnsupportedFieldError(
            "One prompt is read at a time here; send them apart.", param="prompt"
        )
    else:
        [given], param = body.prompt, "prompt"
        prompt = await asyncio.to_thread(text_prompt, service, given, param)
    return _Asked(service, prompt, namespace, param, body.deadline_s)


async def _prefill(request: Request, asked: _Asked) -> Prefilled:
    service, record = asked.service, RequestRecord.of(request)
    wanted = GenerationRequest(
        request_id=record.request_id,
        prompt=asked.prompt,
        max_new_tokens=service.answer_tokens(0, len(asked.prompt.token_ids), asked.param),
        arrival_s=record.arrival_s,
        deadline_s=service.deadline_s(request, asked.within_s),
        namespace=asked.namespace,
    )
    async with service.generation(request, [wanted]) as events:
        async for _, event in events:
            if isinstance(event, Finished):
                finished = event
    return {
        "object": "prefill",
        "model": service.info.name,
        "usage": usage([finished]),
        "mtplx": report(finished),
    }


async def _forecast(asked: _Asked) -> PrefillForecast:
    patience_s = PLAN_TIMEOUT_S
    error: type[MtplxError] = EngineUnavailableError
    if asked.within_s is not None and asked.within_s < patience_s:
        # Then it is no fault of the server's.
        patience_s, error = asked.within_s, DeadlineExceededError
    engine, model = asked.service.engine, asked.service.info.name
    planned = asyncio.wrap_future(engine.plan(asked.prompt, asked.namespace, model))
    try:
        async with asyncio.timeout(patience_s):
            return await planned
    except TimeoutError:
        raise error(
            f"The engine was busy with one step for {patience_s:g} seconds. Ask again."
        ) from None


def _plan(asked: _Asked, forecast: PrefillForecast) -> Plan:
    cached_tokens = forecast.memory_tokens + forecast.disk_tokens
    return {
        "object": "prefill.plan",
        "model": asked.service.info.name,
        "prompt_tokens": forecast.prompt_tokens,
        "cached_tokens": {
            "memory": forecast.memory_tokens,
            "disk": forecast.disk_tokens,
        },
        "new_tokens": forecast.prompt_tokens - cached_tokens,
        "cache_miss_reason": forecast.miss_reason,
        "stable_prefix_tokens": asked.prompt.stable_prefix_len,
        "spans": [{"start": start, "end": end} for start, end in forecast.spans],
        "edges": list(forecast.edges),
        "snapshots": list(forecast.snapshots),
        "kv_bytes": forecast.kv_bytes,
        "expected_s": forecast.seconds,
        "expected_error": forecast.seconds_error,
    }
