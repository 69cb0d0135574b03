"""A completion from the engine's events, whole and in chunks.

OpenAI's shape, plus ``mtplx`` and ``prompt_progress``. A chunk looks like the whole
answer. Runs on the event loop.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, NotRequired

from fastapi import Request
from typing_extensions import TypedDict

from mtplx.server.access import RequestRecord
from mtplx.server.completion_body import CompletionBody
from mtplx.server.handle import Generation
from mtplx.server.keepalive import keep_alive
from mtplx.server.logprobs import TextLogprobs, TextScores, merged
from mtplx.server.responses import PromptProgress, Usage, progress, report, usage
from mtplx.server.service import Service
from mtplx.server.sse import DONE, frame
from mtplx.types import (
    Finished,
    GenerationRequest,
    PrefillProgress,
    PromptLogprobs,
    TextDelta,
)

TextFinishReason = Literal["stop", "length"]


class TextChoice(TypedDict):
    """One answer to one prompt, or what a chunk adds to it. ``index`` counts the answers
    to the first prompt, then those to the second, and so on."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinishReason | None


class TextCompletion(TypedDict):
    """Answer of ``POST /v1/completions``, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: NotRequired[Usage | None]
    prompt_progress: NotRequired[PromptProgress]
    mtplx: NotRequired[dict[str, Any]]


class CompletionAnswer:
    """The answers to one request.

    Args:
        service: Tells the model.
        http, body: What was asked.
        requests: What the engine was asked, one for each choice.
        generation: The engine's work on them, entered.
    """

    def __init__(
        self,
        service: Service,
        http: Request,
        body: CompletionBody,
        requests: Sequence[GenerationRequest],
        generation: Generation,
    ) -> None:
        self._record = RequestRecord.of(http)
        self._settings = service.configuration.settings
        self._body = body
        self._generation = generation
        self._head: dict[str, Any] = {
            "id": f"cmpl-{self._record.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.info.name,
            "system_fingerprint": service.fingerprint,
        }
        told = body.echo or self._settings.log_prompts
        self._prompts = [
            given if isinstance(given, str) else service.text_of(given) if told else ""
            for given in body.prompt
        ]
        self._choices = [
            _Choice(
                index,
                request,
                self._prompts[index // body.n] if body.echo else "",
                TextScores(service.tokenizer),
            )
            for index, request in enumerate(requests)
        ]

    async def whole(self) -> TextCompletion:
        """Return the body of an answer that is not streamed."""
        for choice in self._choices:
            choice.opening()
        async for index, event in self._generation:
            if not isinstance(event, PrefillProgress):
                self._choices[index].take(event)
        answer = self._object([choice.whole() for choice in self._choices])
        answer["usage"] = self._usage()
        answer["mtplx"] = self._report()
        return answer

    def frames(self) -> AsyncIterator[bytes]:
        """Yield the frames of a stream, with beats where they fail to come."""
        return keep_alive(self._frames(), self._settings.sse_keepalive, self._beat)

    async def _frames(self) -> AsyncIterator[bytes]:
        # Something real goes out before the prefill: the prompt, or an empty text.
        for choice in self._choices:
            yield frame(self._chunk([choice.opening()]))
        async for index, event in self._generation:
            choice = self._choices[index]
            if isinstance(event, PrefillProgress):
                if self._body.return_progress:
                    chunk = self._chunk([choice.shape("")])
                    chunk["prompt_progress"] = progress(event, self._record.arrival_s)
                    yield frame(chunk)
                continue
            addition = choice.take(event)
            if isinstance(event, Finished):
                for chunk in self._closing(addition):
                    yield frame(chunk)
            elif addition["text"] or addition["logprobs"]:
                yield frame(self._chunk([addition]))
        yield DONE

    def close(self) -> None:
        """Give the texts to the log where that is asked for."""
        if self._settings.log_prompts:
            self._record.prompt_text = "\n".join(self._prompts)
            self._record.answer_text = "\n".join(choice.text for choice in self._choices)

    def _beat(self) -> bytes:
        waiting = next(choice for choice in self._choices if choice.end is None)
        return frame(self._chunk([waiting.shape("")]))

    def _closing(self, last: TextChoice) -> list[TextCompletion]:
        """The chunk that ends a choice and, after all, the usage where it is asked for."""
        chunks = [self._chunk([last])]
        if all(choice.end for choice in self._choices):
            if self._body.stream_options.include_usage:
                chunks.append(self._chunk([]))
                chunks[-1]["usage"] = self._usage()
            chunks[-1]["mtplx"] = self._report()
        return chunks

    def _chunk(self, choices: list[TextChoice]) -> TextCompletion:
        chunk = self._object(choices)
        if self._body.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _object(self, choices: list[TextChoice]) -> TextCompletion:
        return {**self._head, "choices": choices}  # type: ignore[typeddict-item]

    def _usage(self) -> Usage:
        return usage(self._ends(), choices=self._body.n)

    def _report(self) -> dict[str, Any]:
        return report(*self._ends())

    def _ends(self) -> list[Finished]:
        return [choice.end for choice in self._choices if choice.end is not None]


class _Choice:
    """One answer so far.

    Args:
        index: Its place among the choices.
        request: What the engine was asked.
        echo: The text it begins with.
        scores: Spells its tokens.

    Attributes:
        text: What has come, the echo included.
        end: None until it is complete.
    """

    def __init__(
        self, index: int, request: GenerationRequest, echo: str, scores: TextScores
    ) -> None:
        self.text = ""
        self.end: Finished | None = None
        self._index = index
        self._request = request
        self._echo = echo
        self._scores = scores
        self._pieces: list[TextLogprobs] = []

    def opening(self) -> TextChoice:
        """Take in, and return, what is known before the engine begins."""
        # Where its tokens are scored, the prompt comes with the scores.
        return self._add("" if self._request.prompt_logprobs else self._echo)

    def take(self, event: PromptLogprobs | TextDelta | Finished) -> TextChoice:
        """Take in an event, and return what it adds."""
        match event:
            case PromptLogprobs(scored):
                token_ids = self._request.prompt.token_ids
                logprobs = self._scores.spell(token_ids, scored, self._echo)
                return self._add(self._echo, logprobs)
            case TextDelta(text, token_ids, scored) if self._request.logprobs is not None:
                return self._add(text, self._scores.spell(token_ids, scored))
            case TextDelta(text):
                return self._add(text)
            case Finished():
                self.end = event
                return self.shape("")

    def shape(self, text: str, logprobs: TextLogprobs | None = None) -> TextChoice:
        """Return the choice with this text; it tells the end once that is known."""
        reason = None if self.end is None else self.end.reason
        assert reason != "cancelled"
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": reason,
        }

    def whole(self) -> TextChoice:
        """Return all of it."""
        scored = self._request.logprobs is not None
        return self.shape(self.text, merged(self._pieces) if scored else None)

    def _add(self, text: str, logprobs: TextLogprobs | None = None) -> TextChoice:
        self.text += text
        if logprobs is not None:
            self._pieces.append(logprobs)
        return self.shape(text, logprobs)
