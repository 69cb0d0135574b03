"""One turn of a conversation, whichever API asked for it.

``chat.py``, ``responses_api.py`` and ``messages.py`` translate their bodies into a
``TurnRequest`` and a ``Turn``'s events into their shapes; what happens in between
(rendering, grammar, generation, reasoning and tool calls told apart, the answer's
tokens kept for the next turn) happens here and once. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mtplx.types import Finished, PrefillProgress, SamplingParams, TokenLogprob

TurnFinishReason = Literal["stop", "length", "tool_calls"]


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


@dataclass(frozen=True)
class TextPart:
    """A piece of the answer's text."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins. ``index`` counts the calls of this answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """A piece of a call's arguments. All pieces together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class TurnEnd:
    """The last event.

    Attributes:
        reason: ``tool_calls`` only when every call is complete; ``length`` wins.
        finished: The engine's end, with metrics and counts.
        reasoning_tokens: Tokens of the answer that were reasoning.
        stop_sequence: The stop string that ended the answer, if one did.
    """

    reason: TurnFinishReason
    finished: Finished
    reasoning_tokens: int = 0
    stop_sequence: str | None = None


TurnEvent = (
    PrefillProgress | TextPart | ReasoningPart | ToolCallStart | ToolCallArguments | TurnEnd
)
