"""What the server asks of the layers below it.

``mtplx.engine`` and ``mtplx.text`` satisfy these; the tests bring fakes. The server
names no class of theirs, so that it can be read, run and tested without MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mtplx.types import EngineStatus, Event, GenerationRequest, Prompt


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


class PromptRenderer(Protocol):
    """Turns messages and text into token ids. Slow, so it is called off the event
    loop, from several threads at a time."""

    def render_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> Prompt:
        """Apply the chat template.

        Raises:
            InvalidRequestError: The template refuses these messages.
        """

    def render_text(self, text: str) -> Prompt:
        """Tokenize plain text.

        Raises:
            InvalidRequestError: The text cannot be tokenized.
        """
