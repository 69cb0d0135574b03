"""Anthropic's API: ``POST /v1/messages`` and ``/v1/messages/count_tokens``.

``body`` says what may be asked, ``translate`` what it means as a turn, ``events`` how the
turn reads as an answer, and ``routes`` puts them together.
"""

from mtplx.server.messages.body import CountTokensBody, MessagesBody
from mtplx.server.messages.routes import add_routes
from mtplx.server.messages.shapes import MessageEvent

__all__ = ["CountTokensBody", "MessageEvent", "MessagesBody", "add_routes"]
