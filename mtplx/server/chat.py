"""``POST /v1/chat/completions``: the route, and its answer from a turn's events.

Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fastapi import FastAPI, Request, Response

from mtplx.server.access import RequestRecord
from mtplx.server.body import read_body
from mtplx.server.chat_body import ChatBody
from mtplx.server.chat_shapes import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
)
from mtplx.server.keepalive import keep_alive
from mtplx.server.logprobs import ChatLogprobs, chat_logprobs
from mtplx.server.openapi import describe
from mtplx.server.responses import Usage, json_response, progress, report, usage
from mtplx.server.service import Service
from mtplx.server.sse import DONE, EventStream, frame
from mtplx.server.turn import (
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
    Turns,
    open_turns,
)
from mtplx.types import Finished, PrefillProgress, TokenLogprob

_DESCRIPTION = describe(ChatBody, ChatCompletion, events=ChatCompletionChunk, done=True)


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.post("/v1/chat/completions", **_DESCRIPTION)
    async def chat_completions(request: Request) -> Response:
        """Answer a chat; with `stream` as server-sent events."""
        body = await read_body(
            request, ChatBody, max_bytes=service.configuration.settings.max_body_bytes
        )
        served = await service.for_model(body.model)
        served.check_logit_bias(body.logit_bias)
        turn = await asyncio.to_thread(
            body.turn, service.namespace(request, body.prompt_cache_key)
        )
        opened = open_turns(served, request, turn, body.n)
        answer = _ChatAnswer(served, request, body)
        if body.stream:
            return EventStream(opened, answer.frames)
        async with opened as turns:
            return json_response(await answer.whole(turns))


class _ChatAnswer:
    """One chat's answers in OpenAI's shapes."""

    def __init__(self, service: Service, http: Request, body: ChatBody) -> None:
        self._tokenizer = service.tokenizer
        self._body = body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{RequestRecord.of(http).request_id}",
            "created": int(time.time()),
            "model": service.info.name,
            "system_fingerprint": service.fingerprint,
        }
        self._arrival_s = RequestRecord.of(http).arrival_s
        self._keepalive = service.configuration.settings.sse_keepalive

    async def whole(self, turns: Turns) -> ChatCompletion:
        """Return the body of an answer that is not streamed."""
        ends: dict[int, TurnEnd] = {}
        scored: list[list[TokenLogprob]] = [[] for _ in range(self._body.n)]
        async for index, event in turns:
            if isinstance(event, TextPart):
                scored[index] += event.logprobs
            elif isinstance(event, TurnEnd):
                ends[index] = event
        return {
            **self._head,  # type: ignore[typeddict-item]
            "object": "chat.completion",
            "choices": [
                self._choice(index, end, turns.message(index), scored[index])
                for index, end in sorted(ends.items())
            ],
            "usage": self._usage(ends),
            "mtplx": report(*_in_order(ends)),
        }

    def frames(self, turns: Turns) -> AsyncIterator[bytes]:
        """Yield the frames of a stream, with beats where they fail to come."""
        return keep_alive(self._frames(turns), self._keepalive, self._beat)

    async def _frames(self, turns: Turns) -> AsyncIterator[bytes]:
        # The role goes out before the prefill.
        for index in range(self._body.n):
            yield frame(self._chunk(_adds(index, {"role": "assistant", "content": ""})))
        ends: dict[int, TurnEnd] = {}
        async for index, event in turns:
            if isinstance(event, TurnEnd):
                ends[index] = event
                for chunk in self._closing(index, ends):
                    yield frame(chunk)
            elif not isinstance(event, PrefillProgress):
                yield frame(self._chunk(self._addition(index, event)))
            elif self._body.return_progress:
                chunk = self._chunk(_adds(index, {}))
                chunk["prompt_progress"] = progress(event, self._arrival_s)
                yield frame(chunk)
        yield DONE

    def _beat(self) -> bytes:
        """Return a chunk that adds nothing."""
        return frame(self._chunk(_adds(0, {})))

    def _choice(
        self,
        index: int,
        end: TurnEnd,
        message: dict[str, Any],
        scored: list[TokenLogprob],
    ) -> ChatChoice:
        told: ChatMessage = {
            "role": "assistant",
            "content": message["content"],
            "refusal": None,
        }
        if "reasoning_content" in message:
            told["reasoning_content"] = message["reasoning_content"]
        if "tool_calls" in message:
            told["content"] = message["content"] or None
            told["tool_calls"] = message["tool_calls"]
        return {
            "index": index,
            "message": told,
            "logprobs": self._logprobs(scored) if self._body.logprobs else None,
            "finish_reason": end.reason,
        }

    def _addition(self, index: int, event: TurnEvent) -> ChatChunkChoice:
        match event:
            case TextPart(text, scored):
                choice = _adds(index, {"content": text})
                choice["logprobs"] = self._logprobs(scored) if scored else None
                return choice
            case ReasoningPart(text):
                return _adds(index, {"reasoning_content": text})
            case ToolCallStart(call, call_id, name):
                return _adds(
                    index,
                    {
                        "tool_calls": [
                            {
                                "index": call,
                                "id": call_id,
                                "type": "function",
                                "function": {"name": name, "arguments": ""},
                            }
                        ]
                    },
                )
            case ToolCallArguments(call, text):
                return _adds(
                    index,
                    {"tool_calls": [{"index": call, "function": {"arguments": text}}]},
                )
        raise AssertionError(f"no chunk for {event}")

    def _closing(self, index: int, ends: dict[int, TurnEnd]) -> list[ChatCompletionChunk]:
        """The chunk that ends a choice and, after the last one, the usage if asked for."""
        choice = _adds(index, {})
        choice["finish_reason"] = ends[index].reason
        chunks = [self._chunk(choice)]
        if len(ends) == self._body.n:
            if self._body.stream_options.include_usage:
                chunks.append(self._chunk())
                chunks[-1]["usage"] = self._usage(ends)
            chunks[-1]["mtplx"] = report(*_in_order(ends))
        return chunks

    def _chunk(self, *choices: ChatChunkChoice) -> ChatCompletionChunk:
        chunk: ChatCompletionChunk = {
            **self._head,  # type: ignore[typeddict-item]
            "object": "chat.completion.chunk",
            "choices": list(choices),
        }
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self, ends: dict[int, TurnEnd]) -> Usage:
        return usage(
            _in_order(ends),
            choices=self._body.n,
            reasoning_tokens=sum(end.reasoning_tokens for end in ends.values()),
        )

    def _logprobs(self, scored: Iterable[TokenLogprob]) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, scored)


def _in_order(ends: dict[int, TurnEnd]) -> list[Finished]:
    return [end.finished for _, end in sorted(ends.items())]


def _adds(index: int, delta: ChatDelta) -> ChatChunkChoice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
