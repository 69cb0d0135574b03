"""``/tokenize`` and ``/detokenize``: text or a chat to token ids, and back.

In vLLM's shapes, under ``/`` and ``/v1``. llama.cpp's spelling (``content`` in both
directions, ``add_special``) is understood too; it names nothing that means another thing
here. A chat is rendered as ``/v1/chat/completions`` would. Runs on the event loop, the
work in a thread.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Self

from fastapi import FastAPI, Request, Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from mtplx.server.body import read_object, validate
from mtplx.server.chat_body import ChatBody
from mtplx.server.fields import FieldTable, field_error
from mtplx.server.openapi import describe
from mtplx.server.requests import INVALID, JsonObject
from mtplx.server.responses import json_response
from mtplx.server.service import Service
from mtplx.server.turn import render

_MAX_TOKENS = 1_000_000  # Of one /detokenize: a second of work.
_PREFIXES = ("", "/v1")


class TokenizeBody(JsonObject):
    """Body of ``POST /tokenize`` for a text."""

    table: ClassVar[FieldTable] = FieldTable(
        refused={"parse_special": (True,), "with_pieces": (False,)}
    )

    model: str | None = None
    prompt: str | None = Field(None, description="The text.")
    content: str | None = Field(None, description="As `prompt`.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the model wants around a text "
        "(default: true with `prompt`, false with `content`).",
    )
    add_special: bool | None = Field(None, description="As `add_special_tokens`.")
    return_token_strs: bool = Field(False, description="Tell each token's text.")

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        if (self.prompt is None) == (self.content is None):
            raise field_error(
                INVALID, "Send one of `prompt`, `content` and `messages`.", "prompt"
            )
        if None not in (self.add_special_tokens, self.add_special):
            raise field_error(
                INVALID, "`add_special` is `add_special_tokens`; send one.", "add_special"
            )
        return self

    def text(self) -> str:
        """Return what is to be tokenized."""
        text = self.content if self.prompt is None else self.prompt
        assert text is not None
        return text

    def with_special_tokens(self) -> bool:
        """Say whether special tokens are added."""
        for said in (self.add_special_tokens, self.add_special):
            if said is not None:
                return said
        return self.prompt is not None


class TokenizeChatBody(ChatBody):
    """Body of ``POST /tokenize`` for a chat."""

    return_token_strs: bool = False


class DetokenizeBody(JsonObject):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int] = Field(max_length=_MAX_TOKENS)


class Tokens(TypedDict):
    """Answer of ``POST /tokenize``. ``token_strs`` is null unless it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """Answer of ``POST /detokenize``: the text, under both of its names."""

    prompt: str
    content: str


def add_routes(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def tokenize(request: Request) -> Response:
        """Tell the token ids of a text, or of a chat as it would be read."""
        value = await _object(service, request)
        kind: type[TokenizeBody | TokenizeChatBody]
        kind = TokenizeChatBody if "messages" in value else TokenizeBody
        body = await asyncio.to_thread(validate, value, kind)
        served = await service.for_model(body.model)
        return json_response(await asyncio.to_thread(_tokenize, served, body))

    async def detokenize(request: Request) -> Response:
        """Tell the text of token ids, special tokens included."""
        value = await _object(service, request)
        body = await asyncio.to_thread(validate, value, DetokenizeBody)
        served = await service.for_model(body.model)
        return json_response(await asyncio.to_thread(_detokenize, served, body))

    for prefix in _PREFIXES:
        shown = prefix == ""
        app.post(
            f"{prefix}/tokenize",
            include_in_schema=shown,
            **describe(TokenizeBody, Tokens, TokenizeChatBody),
        )(tokenize)
        app.post(
            f"{prefix}/detokenize",
            include_in_schema=shown,
            **describe(DetokenizeBody, Detokenized),
        )(detokenize)


def _tokenize(service: Service, body: TokenizeBody | TokenizeChatBody) -> Tokens:
    if isinstance(body, TokenizeChatBody):
        token_ids = list(render(service, body.turn(namespace="")).token_ids)
    else:
        token_ids = service.tokenizer.encode(
            body.text(), add_special_tokens=body.with_special_tokens()
        )
    strings = None
    if body.return_token_strs:
        strings = [service.tokenizer.token_text(token_id) for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": service.info.context_length,
        "tokens": token_ids,
        "token_strs": strings,
    }


def _detokenize(service: Service, body: DetokenizeBody) -> Detokenized:
    for index, token_id in enumerate(body.tokens):
        service.check_token_id(token_id, f"tokens[{index}]")
    text = service.text_of(body.tokens)
    return {"prompt": text, "content": text}


async def _object(service: Service, request: Request) -> dict[str, Any]:
    settings = service.configuration.settings
    return await read_object(request, max_bytes=settings.max_body_bytes)
