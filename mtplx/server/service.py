"""What the generating routes share between a valid body and the engine.

Decides what depends on the model: its name, the room its context leaves for the
answer, and rendering off the event loop. Owns nothing that changes but the registry
of open generations. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request

from mtplx.config import Configuration
from mtplx.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from mtplx.server.access import RequestRecord
from mtplx.server.handle import Generation, Generations
from mtplx.server.interfaces import EngineClient, PromptRenderer
from mtplx.server.requests import ChatBody, CompletionBody, GenerationBody
from mtplx.types import GenerationRequest, ModelInfo, Prompt


@dataclass(frozen=True)
class Service:
    """The injected parts of the server."""

    engine: EngineClient
    tokenizer: PromptRenderer
    info: ModelInfo
    configuration: Configuration
    generations: Generations

    @property
    def fingerprint(self) -> str:
        """The short form of the model's fingerprint that answers carry."""
        return f"fp_{self.info.fingerprint[:12]}"

    def check_model(self, name: str | None) -> None:
        """Raise ``ModelNotFoundError`` unless ``name`` is absent or served here."""
        if name is not None and name != self.info.name:
            raise ModelNotFoundError(
                f"The model {name[:200]!r} is not served here; use {self.info.name!r}.",
                param="model",
            )

    async def chat_prompt(self, body: ChatBody) -> Prompt:
        """Render the messages. Raises ``InvalidRequestError``."""
        messages = [message.as_dict() for message in body.messages]
        return await asyncio.to_thread(
            self.tokenizer.render_chat, messages, **body.chat_template_kwargs
        )

    async def text_prompt(self, body: CompletionBody) -> Prompt:
        """Tokenize the text, or check the token ids. Raises ``InvalidRequestError``."""
        if isinstance(body.prompt, str):
            return await asyncio.to_thread(self.tokenizer.render_text, body.prompt)
        vocab_size = self.info.vocab_size
        for index, token_id in enumerate(body.prompt):
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"`prompt[{index}]` must be a token id from 0 to {vocab_size - 1}.",
                    param=f"prompt[{index}]",
                )
        token_ids = tuple(body.prompt)
        return Prompt(token_ids, stable_prefix_len=len(token_ids))

    def generation(
        self, request: Request, body: GenerationBody, prompt: Prompt, param: str
    ) -> Generation:
        """Return the generation, not yet submitted.

        Args:
            request: Gives the arrival, the id and the client's presence.
            body: What was asked for.
            prompt: The rendered prompt.
            param: The field it came from, for errors.

        Raises:
            InvalidRequestError: The prompt has no tokens.
            ContextLengthError: It leaves no room for an answer.
        """
        record = RequestRecord.of(request)
        return Generation(
            self.generations,
            GenerationRequest(
                request_id=record.request_id,
                prompt=prompt,
                max_new_tokens=self._max_new_tokens(body, len(prompt.token_ids), param),
                arrival_s=record.arrival_s,
                sampling=body.sampling(),
                stop=tuple(body.stop),
                deadline_s=(
                    None if body.deadline_s is None else record.arrival_s + body.deadline_s
                ),
            ),
            request.receive,
            record,
        )

    def _max_new_tokens(self, body: GenerationBody, prompt_tokens: int, param: str) -> int:
        limit = self.info.context_length
        if prompt_tokens == 0:
            raise InvalidRequestError(f"`{param}` renders to no tokens.", param=param)
        if prompt_tokens >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, your "
                f"{param} resulted in {prompt_tokens} tokens. Please shorten the {param}.",
                param=param,
            )
        wanted = body.answer_tokens() or self.configuration.settings.max_tokens
        room = limit - prompt_tokens
        return room if wanted is None else min(wanted, room)
