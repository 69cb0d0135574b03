"""What the server asks of the layers below it.

``mtplx.engine`` and ``mtplx.text`` satisfy these; the tests bring fakes, so that the
server can be read, run and tested without MLX and without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from mtplx.text.channels import AnswerFormat, Piece
from mtplx.types import (
    BankView,
    EngineStatus,
    Event,
    GenerationRequest,
    LiveSink,
    ModelInfo,
    PrefillForecast,
    Prompt,
)


class EngineClient(Protocol):
    """The engine as seen from the event loop. Every method returns at once."""

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request. ``on_event`` is called on the engine's thread; the last
        event, exactly one, is ``Finished`` or ``Failed``.

        Raises:
            QueueFullError: Too many requests wait.
            EngineUnavailableError: The engine has stopped.
        """

    def cancel(self, request_id: str) -> None:
        """End a request with ``Finished("cancelled")``. Does nothing when it is over."""

    def status(self) -> EngineStatus:
        """Return the state of this moment, without waiting for the engine."""

    def watch(self, sink: LiveSink) -> None:
        """Tell ``sink`` of each iteration, on the engine's thread.

        Raises:
            EngineUnavailableError: The engine has stopped.
        """

    def unwatch(self, sink: LiveSink) -> None:
        """Tell it no more; soon."""

    def view(self) -> Future[BankView]:
        """Ask what the SessionBank holds; the answer comes as with ``plan``.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future.
        """

    @property
    def names(self) -> tuple[str, ...]:
        """The models that may be asked for, the first one first; they never change."""

    @property
    def loaded(self) -> Mapping[str, ModelInfo]:
        """Those of them that are in memory, the first one first, which always is."""

    # A future of a ``ServedModel``: futures are invariant, and the engine has its own.
    def model(self, name: str) -> Future[Any]:
        """Ask for a model, which is loaded if need be; others wait for that.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future, as are
                ``ModelLoadError``, ``ConfigError``, ``ModelNotFoundError`` and
                ``QueueFullError``.
        """

    def plan(
        self, prompt: Prompt, namespace: str, model: str = ""
    ) -> Future[PrefillForecast]:
        """Ask what reading ``prompt`` would take a model now; empty means the first. The
        answer comes from the engine's thread, between two iterations; a future cancelled
        by then is not worked on.

        Raises:
            EngineUnavailableError: The engine has stopped. Also from the future.
        """


class ChannelParser(Protocol):
    """Tells the text, the reasoning and the calls of one answer apart."""

    @property
    def reasoning_tokens(self) -> int:
        """Tokens that came while the model was reasoning."""

    @property
    def unfinished_call(self) -> bool:
        """A call was begun and never ended."""

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Piece]:
        """Add a piece of the answer and return what is now certain."""

    def finish(self, *, truncated: bool = False) -> list[Piece]:
        """End the answer, which was cut off or not, and return the rest."""


class PromptRenderer(Protocol):
    """Turns messages and text into token ids, and answers into messages. Slow, so it is
    called off the event loop, from several threads at a time."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        continue_final_message: bool = False,
        edge_after: Sequence[int] = (),
        **template_kwargs: Any,
    ) -> Prompt:
        """Apply the chat template.

        Raises:
            InvalidRequestError: The template refuses these messages.
        """

    def render_text(self, text: str) -> Prompt:
        """Tokenize plain text.

        Raises:
            InvalidRequestError: The text cannot be tokenized.
        """

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return token ids; ``add_special_tokens`` adds what the model wants around a
        plain text.

        Raises:
            InvalidRequestError: The text cannot be tokenized.
        """

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model's answers are laid out."""

    def opens_reasoning(self, prompt: Prompt) -> bool:
        """Whether the answer to ``prompt`` begins inside reasoning."""

    def channels(
        self, prompt: Prompt, *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> ChannelParser:
        """Return the parser for an answer to ``prompt``. Quick; any thread."""

    def remember(
        self, prompt: Prompt, token_ids: Sequence[int], message: Mapping[str, Any]
    ) -> None:
        """Keep the tokens of an answer, for when ``message`` comes back as history."""

    def token_text(self, token_id: int) -> str:
        """Return what a token is shown as; broken characters are U+FFFD."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""


class ServedModel(Protocol):
    """A model that is in memory."""

    @property
    def info(self) -> ModelInfo:
        """What clients are told about it."""

    @property
    def tokenizer(self) -> PromptRenderer:
        """Its tokenizer."""
