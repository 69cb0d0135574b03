"""One turn of a conversation, whichever API asked for it.

``chat.py``, ``responses_api.py`` and ``messages.py`` translate their bodies into a
``TurnRequest`` and a ``Turn``'s events into their shapes; what happens in between
(rendering, grammar, generation, reasoning and tool calls told apart, the answer's
tokens kept for the next turn) happens here and once. Runs on the event loop.

    async with open_turn(service, http_request, turn_request) as turn:
        async for event in turn:      # any TurnEvents, the last one a TurnEnd
            ...

Entering renders and submits, so that whatever is wrong with the request is raised
there, before a header is sent. Leaving early cancels. ``open_turns`` is the same for
several answers to one prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from starlette.requests import Request

from mtplx.server.access import RequestRecord
from mtplx.server.answer import (
    Answer,
    ReasoningPart,
    TextPart,
    ToolCallArguments,
    ToolCallStart,
    TurnEnd,
    TurnEvent,
    TurnFinishReason,
)
from mtplx.server.handle import Generation
from mtplx.server.service import Service
from mtplx.text.grammar import answer_grammar
from mtplx.types import (
    Finished,
    GenerationRequest,
    PrefillProgress,
    Prompt,
    SamplingParams,
    TextDelta,
)

__all__ = [
    "ReasoningPart",
    "TextPart",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "Turn",
    "TurnEnd",
    "TurnEvent",
    "TurnFinishReason",
    "TurnRequest",
    "Turns",
    "open_turn",
    "open_turns",
    "render",
    "siblings",
]

logger = logging.getLogger("mtplx.server")


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the answer may, or must, call.

    Attributes:
        mode: ``auto`` leaves it to the model, ``none`` shows it no tools, ``required``
            makes it call one.
        name: With ``required``, the one to call; None leaves the choice.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None


@dataclass(frozen=True)
class TurnRequest:
    """What is asked for.

    Attributes:
        messages: As chat templates read them: ``role`` (system, user, assistant, tool),
            ``content`` (a string), and where they apply ``reasoning_content``,
            ``tool_calls`` (``{"id", "type": "function", "function": {"name",
            "arguments": <JSON text>}}``), ``tool_call_id`` and ``name``.
        tools: ``{"type": "function", "function": {"name", "description", "parameters",
            "strict"}}``.
        tool_choice: Which of them.
        parallel_tool_calls: More than one call may be made.
        grammar: What the answer's text must match; of ``mtplx.text.grammar``.
        template_kwargs: Variables of the chat template.
        continue_final_message: The last message is the beginning of the answer.
        edge_after: Indices of messages after which state is to be kept.
        sampling, stop, logprobs, namespace: As in ``GenerationRequest``.
        max_new_tokens: None takes the server's default.
        deadline_after_s: Seconds after its arrival.
        param: The field the messages came from, for errors.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    grammar: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    edge_after: tuple[int, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    logprobs: int | None = None
    namespace: str = ""
    deadline_after_s: float | None = None
    param: str = "messages"

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the prompt names and the answer may call."""
        return () if self.tool_choice.mode == "none" else self.tools


class Turn:
    """One answer on its way: an async iterator of ``TurnEvent``.

    Attributes:
        prompt: As it was rendered.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.prompt = turns.prompt

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far, as the next turn's history has it."""
        return self._turns.message(0)

    async def __aiter__(self) -> AsyncIterator[TurnEvent]:
        async for _, event in self._turns:
            yield event


class Turns:
    """Several answers to one prompt: an async iterator of ``(index, TurnEvent)``.

    Attributes:
        prompt: As it was rendered.

    Raises as ``Generation`` does.
    """

    def __init__(
        self,
        service: Service,
        record: RequestRecord,
        prompt: Prompt,
        generation: Generation,
        answers: Sequence[Answer],
    ) -> None:
        self.prompt = prompt
        self._service = service
        self._record = record
        self._generation = generation
        self._answers = answers
        self._keeping: list[asyncio.Future[None]] = []

    def message(self, index: int) -> dict[str, Any]:
        """Return the answer so far, as the next turn's history has it."""
        return self._answers[index].message()

    async def __aiter__(self) -> AsyncIterator[tuple[int, TurnEvent]]:
        async for index, event in self._generation:
            match event:
                case TextDelta():
                    for each in self._answers[index].add(event):
                        yield index, each
                case Finished():
                    last = self._answers[index].end(event)
                    self._keep(self._answers[index])
                    for each in last:
                        yield index, each
                case PrefillProgress():
                    yield index, event

    def _keep(self, answer: Answer) -> None:
        if not answer.token_ids:
            return
        # Beside the last events, which must not wait for it.
        self._keeping.append(
            asyncio.get_running_loop().run_in_executor(
                None,
                self._service.tokenizer.remember,
                self.prompt,
                tuple(answer.token_ids),
                answer.message(),
            )
        )

    async def close(self) -> None:
        """Wait until the tokens of the answers are remembered, and give their texts to
        the log where that is asked for."""
        for outcome in await asyncio.gather(*self._keeping, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("An answer is not remembered: a bug", exc_info=outcome)
        if self._service.configuration.settings.log_prompts:
            self._record.prompt_text = self.prompt.text
            self._record.answer_text = "\n".join(
                self._service.text_of(answer.token_ids) for answer in self._answers
            )


@asynccontextmanager
async def open_turn(
    service: Service, http: Request, request: TurnRequest
) -> AsyncIterator[Turn]:
    """Render and submit ``request``; see the head of this file.

    Raises:
        InvalidRequestError: The messages, the tools or the grammar cannot be used.
        QueueFullError, EngineUnavailableError: Nothing was submitted.
    """
    async with open_turns(service, http, request) as turns:
        yield Turn(turns)


@asynccontextmanager
async def open_turns(
    service: Service, http: Request, request: TurnRequest, count: int = 1
) -> AsyncIterator[Turns]:
    """As ``open_turn``, for ``count`` answers; each one's seed is one more."""
    prompt, grammar = await asyncio.to_thread(_prepare, service, request)
    record = RequestRecord.of(http)
    first = GenerationRequest(
        request_id=record.request_id,
        prompt=prompt,
        max_new_tokens=service.answer_tokens(
            request.max_new_tokens, len(prompt.token_ids), request.param
        ),
        arrival_s=record.arrival_s,
        sampling=request.sampling,
        stop=request.stop,
        deadline_s=service.deadline_s(http, request.deadline_after_s),
        logprobs=request.logprobs,
        grammar=grammar,
        namespace=request.namespace,
    )
    requests = siblings(first, count)
    answers = [
        Answer(service.tokenizer.channels(prompt, tools=request.shown_tools))
        for _ in requests
    ]
    async with service.generation(http, requests) as generation:
        turns = Turns(service, record, prompt, generation, answers)
        yield turns
    await turns.close()


def siblings(first: GenerationRequest, count: int) -> list[GenerationRequest]:
    """Return ``count`` requests for the same prompt: ``first``, and others that draw
    otherwise."""
    requests = [first]
    for index in range(1, count):
        sampling = first.sampling
        if sampling.seed is not None:
            sampling = replace(sampling, seed=sampling.seed + index)
        name = f"{first.request_id}-{index}"
        requests.append(replace(first, request_id=name, sampling=sampling))
    return requests


def render(service: Service, request: TurnRequest) -> Prompt:
    """Return the prompt of ``request``. Slow; any thread.

    Raises:
        InvalidRequestError: The template refuses the messages or the tools.
    """
    return service.tokenizer.render_chat(
        request.messages,
        tools=request.shown_tools,
        continue_final_message=request.continue_final_message,
        edge_after=request.edge_after,
        **request.template_kwargs,
    )


def _prepare(service: Service, request: TurnRequest) -> tuple[Prompt, str | None]:
    """Return the prompt, and the grammar of the whole answer to it."""
    prompt = render(service, request)
    choice = request.tool_choice
    return prompt, answer_grammar(
        service.tokenizer.answer_format,
        grammar=request.grammar,
        tools=request.shown_tools,
        required=choice.mode == "required",
        name=choice.name,
        parallel=request.parallel_tool_calls,
        reasoning=service.tokenizer.opens_reasoning(prompt),
    )
