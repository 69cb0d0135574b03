"""``POST /v1/completions``: the route, and its prompts to requests.

There are no channels here: what the model writes is the text. Runs on the event loop,
but for tokenizing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response

from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.completion_answer import CompletionAnswer, TextCompletion
from mtplx.server.completion_body import CompletionBody
from mtplx.server.openapi import describe
from mtplx.server.responses import json_response
from mtplx.server.service import Service
from mtplx.server.sse import EventStream
from mtplx.server.turn import siblings
from mtplx.types import GenerationRequest, Prompt

_DESCRIPTION = describe(CompletionBody, TextCompletion, events=TextCompletion, done=True)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/completions", **_DESCRIPTION)
    async def completions(request: Request) -> Response:
        """Continue a text; with `stream` as server-sent events."""
        body = await read_body(
            request, CompletionBody, max_bytes=service.configuration.settings.max_body_bytes
        )
        served = await service.for_model(body.model)
        served.check_logit_bias(body.logit_bias)
        opened = _open(served, request, body)
        if body.stream:
            return EventStream(opened, CompletionAnswer.frames)
        async with opened as answer:
            return json_response(await answer.whole())


@asynccontextmanager
async def _open(
    service: Service, http: Request, body: CompletionBody
) -> AsyncIterator[CompletionAnswer]:
    """Tokenize and submit.

    Raises:
        MtplxError: The request is refused; nothing was submitted.
    """
    requests = await asyncio.to_thread(_requests, service, http, body)
    async with service.generation(http, requests) as generation:
        answer = CompletionAnswer(service, http, body, requests, generation)
        yield answer
    answer.close()


def _requests(
    service: Service, http: Request, body: CompletionBody
) -> list[GenerationRequest]:
    record = RequestRecord.of(http)
    grammar = body.grammar()
    namespace = service.namespace(http, body.prompt_cache_key)
    requests = []
    for index, given in enumerate(body.prompt):
        param = f"prompt[{index}]" if len(body.prompt) > 1 else "prompt"
        prompt = text_prompt(service, given, param)
        first = GenerationRequest(
            request_id=f"{record.request_id}.{index}" if index else record.request_id,
            prompt=prompt,
            max_new_tokens=service.answer_tokens(
                body.max_tokens, len(prompt.token_ids), param
            ),
            arrival_s=record.arrival_s,
            sampling=body.sampling(),
            stop=tuple(body.stop),
            deadline_s=service.deadline_s(http, body.deadline_s),
            logprobs=body.logprobs,
            prompt_logprobs=body.echo and body.logprobs is not None,
            grammar=grammar,
            namespace=namespace,
        )
        requests += siblings(first, body.n)
    return requests


def text_prompt(service: Service, given: str | list[Any], param: str) -> Prompt:
    """Tokenize a text, or check token ids. Slow; not for the event loop.

    Raises:
        InvalidRequestError: They cannot be read.
    """
    if isinstance(given, str):
        return service.tokenizer.render_text(given)
    for index, token_id in enumerate(given):
        service.check_token_id(token_id, f"{param}[{index}]")
    return Prompt(tuple(given), stable_prefix_len=len(given))
