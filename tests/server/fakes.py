"""An engine and a tokenizer that behave like the real ones, without a model.

The tokenizer's tokens are bytes, and words of answers. The engine answers with the words
of ``answer`` (``w0 w1 w2 ...``), one a token, on a thread of its own; it keeps the
requests it was given, counts the prefix that two prompts in a row share as cached, and
waits at ``gate`` before each token so that a test decides when time passes. A word that
is a stop string ends the answer. Its first model is ``INFO``; others are loaded when they
are asked for, and that waits at ``gate`` too. Its bank holds its last prompt, in one run.

In an answer, ``<think>...</think>`` is reasoning and ``<call NAME>ARGUMENTS</call>`` a
tool call.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from mtplx.errors import EngineUnavailableError, InvalidRequestError, QueueFullError
from mtplx.metrics import PrefillClock, PrefillMetrics
from mtplx.text.channels import AnswerFormat, Piece, Reasoning, Text
from mtplx.text.tool_calls import PLAIN_JSON, CallArguments, CallEnd, CallStart
from mtplx.types import (
    BankNode,
    BankView,
    EngineStatus,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    LiveIteration,
    LiveSink,
    LiveSpan,
    ModelInfo,
    PrefillProgress,
    Prompt,
    PromptLogprobs,
    TextDelta,
    TokenLogprob,
)

INFO = ModelInfo(
    name="org/fake-model",
    context_length=400,
    vocab_size=256,
    device="cpu",
    dtype="float32",
    cache_kinds={"trimmable": 2},
    fingerprint="0123456789abcdef0123456789abcdef",
    backend="none",
    created=1_700_000_000,
)

ANSWER = ("w0 ", "w1 ", "w2 ", "w3 ", "w4 ")
ANSWER_TOKENS = len(ANSWER)

BEGIN = 1
"""The special token that the tokenizer puts before a plain text, when it encodes one."""

_WORDS: list[str] = []


def word_id(word: str) -> int:
    """Return the token id of a word of an answer."""
    if word not in _WORDS:
        _WORDS.append(word)
    return 256 + _WORDS.index(word)


class FakeChannels:
    """Understands the markup above, in pieces cut anywhere."""

    _TAG = re.compile(r"<(think|/think|call [^>]*|/call)>")

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._rest = ""
        self._kind: Callable[[str], Piece] = Text

    @property
    def unfinished_call(self) -> bool:
        return self._kind is CallArguments

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        self._rest += text
        reasoned = self._kind is Reasoning
        pieces = list(self._tagged())
        if reasoned or self._kind is Reasoning:
            self.reasoning_tokens += len(token_ids)
        cut = self._rest.rfind("<")
        return pieces + self._piece(len(self._rest) if cut < 0 else cut)

    def finish(self, *, truncated: bool = False) -> list[Piece]:
        return self._piece(len(self._rest))

    def _tagged(self) -> Iterator[Piece]:
        while tag := self._TAG.search(self._rest):
            yield from self._piece(tag.start())
            self._rest = self._rest[len(tag.group()) :]
            name, _, argument = tag.group(1).partition(" ")
            if name == "call":
                yield CallStart(argument)
            elif name == "/call":
                yield CallEnd()
            self._kind = {"think": Reasoning, "call": CallArguments}.get(name, Text)

    def _piece(self, length: int) -> list[Piece]:
        text, self._rest = self._rest[:length], self._rest[length:]
        return [self._kind(text)] if text else []


class FakeTokenizer:
    """Bytes are tokens; the text ``forbidden`` is refused.

    Attributes:
        messages, tools, template_kwargs: Of the last ``render_chat``.
        remembered: What ``remember`` was told.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self.edge_after: tuple[int, ...] = ()
        self.template_kwargs: dict[str, Any] = {}
        self.remembered: list[tuple[Prompt, tuple[int, ...], dict[str, Any]]] = []

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        edge_after: Sequence[int] = (),
        **template_kwargs: Any,
    ) -> Prompt:
        self.messages = [dict(message) for message in messages]
        self.tools = [dict(tool) for tool in tools]
        self.edge_after = tuple(edge_after)
        self.template_kwargs = template_kwargs
        history = "".join(f"<tool>{tool['function']['name']}\n" for tool in tools)
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            text = message["content"]
            text += "".join(f"{each['name']}{each['arguments']}" for each in calls)
            history += f"<{message['role']}>{text}\n"
        if continue_final_message:
            return self.render_text(history.removesuffix("\n"))
        prompt = self.render_text(history + "<assistant>")
        return Prompt(prompt.token_ids, (len(history),), len(history), prompt.text)

    def render_text(self, text: str) -> Prompt:
        if "forbidden" in text:
            raise InvalidRequestError("This text is forbidden.", param="messages")
        return Prompt(tuple(text.encode()), text=text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [*([BEGIN] if add_special_tokens else []), *self.render_text(text).token_ids]

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat(("<think>", "</think>"), PLAIN_JSON)

    def opens_reasoning(self, prompt: Prompt) -> bool:
        return False

    def channels(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> FakeChannels:
        return FakeChannels()

    def remember(
        self, prompt: Prompt, token_ids: Sequence[int], message: Mapping[str, Any]
    ) -> None:
        self.remembered.append((prompt, tuple(token_ids), dict(message)))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return _WORDS[token_id - 256].encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass(frozen=True)
class FakeModel:
    """A model that ``FakeEngine`` serves."""

    info: ModelInfo
    tokenizer: FakeTokenizer


def fake_model(name: str, **info: Any) -> FakeModel:
    """Return a model like ``INFO``, but for its name and ``info``."""
    return FakeModel(replace(INFO, name=name, **info), FakeTokenizer())


class FakeEngine:
    """Runs requests one after another until ``close``.

    Args:
        others: Models besides the first one, none of them loaded.

    Attributes:
        gate: Closed (cleared), it holds the engine before its next token; a
            cancellation passes.
        failure: When set, the event that replaces the second token of every answer.
        refusal: When set, what ``submit`` raises.
        unloadable: When set, what loading a model ends with.
        room: When set, how many requests are taken; more find the queue full.
        alive: What ``status`` says.
        answer: The words of every answer.
        requests: What was submitted.
        loading: Name of the model that is being loaded.
        loads: Names of the models that were loaded.
        ended: Request id -> its last event.
        sinks: Those who watch.
        namespace: Whose the state in its bank is.
    """

    def __init__(self, *others: FakeModel) -> None:
        self._others = {model.info.name: model for model in others}
        self._inbox: queue.Queue[
            tuple[GenerationRequest, Callable[[Event], None]]
            | tuple[str, Future[FakeModel]]
            | None
        ]
        self._inbox = queue.Queue()
        self._cancelled: set[str] = set()
        self._changed = threading.Condition()
        self._previous: tuple[int, ...] = ()
        self.reset()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Failed | None = None
        self.refusal: Exception | None = None
        self.unloadable: Exception | None = None
        self.room: int | None = None
        self.alive = True
        self.answer: Sequence[str] = ANSWER
        self.requests: list[GenerationRequest] = []
        self.loading: str | None = None
        self.loads: list[str] = []
        self.ended: dict[str, Event] = {}
        self.sinks: list[LiveSink] = []
        self.namespace = ""

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        if len(self.requests) == self.room:
            raise queue_full()
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()
        self._inbox.put((request, on_event))

    def cancel(self, request_id: str) -> None:
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    @property
    def names(self) -> tuple[str, ...]:
        return (INFO.name, *self._others)

    @property
    def loaded(self) -> dict[str, ModelInfo]:
        there = {name: self._others[name].info for name in self.loads}
        return {INFO.name: INFO, **there}

    def model(self, name: str) -> Future[FakeModel]:
        future: Future[FakeModel] = Future()
        self._inbox.put((name, future))
        return future

    def status(self) -> EngineStatus:
        return EngineStatus(alive=self.alive, running=len(self.requests) - len(self.ended))

    def watch(self, sink: LiveSink) -> None:
        if not self.alive:
            raise engine_stopped()
        with self._changed:
            self.sinks.append(sink)
            self._changed.notify_all()

    def unwatch(self, sink: LiveSink) -> None:
        with self._changed:
            self.sinks.remove(sink)
            self._changed.notify_all()

    def view(self) -> Future[BankView]:
        tokens = self._previous
        node = BankNode(
            parent=None,
            fingerprint=INFO.fingerprint,
            namespace=self.namespace,
            start=0,
            end=len(tokens),
            first_tokens=tokens[:8],
            nbytes=100 * len(tokens),
            snapshots=(),
            uses=1,
            age=0,
            pinned=False,
            children=0,
        )
        future: Future[BankView] = Future()
        future.set_result(BankView((node,) if tokens else ()))
        return future

    def close(self) -> None:
        self.gate.set()
        self._inbox.put(None)
        self._thread.join()

    def open_gate(self) -> None:
        with self._changed:
            self.gate.set()
            self._changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; fail after ten seconds."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout=10)

    def wait_submitted(self, count: int = 1) -> None:
        self.wait(lambda: len(self.requests) >= count)

    def wait_idle(self) -> None:
        self.wait(lambda: len(self.ended) == len(self.requests))

    def _run(self) -> None:
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        # A frame of its own: an idle engine holds on to no request.
        item = self._inbox.get()
        if item is None:
            return False
        if isinstance(item[1], Future):
            self._load(*item)
            return True
        request, on_event = item
        last = self._answer(request, on_event)
        on_event(last)
        with self._changed:
            self.ended[request.request_id] = last
            self._changed.notify_all()
        return True

    def _load(self, name: str, future: Future[FakeModel]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        with self._changed:
            self.loading = name
            self._changed.notify_all()
        self._may_go_on(name)
        if self.unloadable is not None:
            future.set_exception(self.unloadable)
            return
        with self._changed:
            self.loading = None
            if name not in self.loads:
                self.loads.append(name)
            self._changed.notify_all()
        future.set_result(self._others[name])

    def _answer(
        self, request: GenerationRequest, on_event: Callable[[Event], None]
    ) -> Event:
        prompt_tokens = len(request.prompt.token_ids)
        on_event(PrefillProgress(0, 0, prompt_tokens))
        metrics = self._prefill(request)
        on_event(PrefillProgress(prompt_tokens, metrics.cached_tokens, prompt_tokens))
        name = request.request_id
        span = LiveSpan(name, metrics.cached_tokens, prompt_tokens, True, False, 0.001)
        self._tell((), (span,))
        if request.prompt_logprobs:
            scored = [_scored(t, request) for t in request.prompt.token_ids[1:]]
            on_event(PromptLogprobs((None, *scored)))
        words = self.answer[: request.max_new_tokens]
        on_event(TextDelta("", ()))
        for n, word in enumerate(words):
            if not self._may_go_on(request.request_id):
                return Finished("cancelled", n, metrics if n else None)
            if n == 1 and self.failure is not None:
                return self.failure
            token_id = word_id(word)
            if word in request.stop:
                on_event(TextDelta("", (token_id,)))
                return Finished("stop", n + 1, metrics, stop_text=word)
            logprobs = () if request.logprobs is None else (_scored(token_id, request),)
            on_event(TextDelta(word, (token_id,), logprobs))
            self._tell((name,), ())
        whole = len(words) == len(self.answer)
        return Finished("stop" if whole else "length", len(words), metrics)

    def _tell(self, decoding: tuple[str, ...], spans: tuple[LiveSpan, ...]) -> None:
        for sink in [*self.sinks]:
            sink(
                LiveIteration(
                    number=1,
                    model=INFO.name,
                    begin_s=time.perf_counter(),
                    took_s=0.002,
                    decode_s=0.002 if decoding else None,
                    decoding=decoding,
                    gaps_s=(0.003,) * len(decoding),
                    spans=spans,
                    target_s=0.1,
                    predicted_s=0.002,
                    why="every started prompt is complete after this step",
                )
            )

    def _may_go_on(self, request_id: str) -> bool:
        with self._changed:
            self._changed.wait_for(
                lambda: self.gate.is_set() or request_id in self._cancelled
            )
            return request_id not in self._cancelled

    def _prefill(self, request: GenerationRequest) -> PrefillMetrics:
        token_ids = request.prompt.token_ids
        cached = 0
        for mine, before in zip(token_ids[:-1], self._previous, strict=False):
            if mine != before:
                break
            cached += 1
        self._previous = token_ids
        clock = PrefillClock(len(token_ids), request.arrival_s, start_s=time.perf_counter())
        clock.restored(cached, 0.0, "empty")
        clock.computed(len(token_ids) - cached, 0.001)
        clock.end_s = clock.first_token_s = time.perf_counter()
        return clock.metrics()


def _scored(token_id: int, request: GenerationRequest) -> TokenLogprob:
    """The token has probability 1/2, byte 63 ("?") 1/4, byte 255 (no text) 1/8."""
    top = ((token_id, -0.5), (63, -1.5), (255, -2.5))
    return TokenLogprob(token_id, -0.5, top[: request.logprobs or 0])


def queue_full() -> QueueFullError:
    return QueueFullError("64 requests wait already. Try again later.", retry_after_s=1.2)


def engine_stopped() -> EngineUnavailableError:
    return EngineUnavailableError("The engine has stopped. Restart the server.")
