"""What the generating routes share between a valid body and the engine.

A ``Service`` stands for one model: routes get the first one's, and ask it for the one
that a body names (``names.py``). Decides what depends on the model, like the room that
its context leaves for the answer. Owns nothing that changes but the registry of open
generations. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request

from mtplx.config import Configuration
from mtplx.errors import ContextLengthError, InvalidRequestError
from mtplx.server.access import RequestRecord
from mtplx.server.handle import Generation, Generations
from mtplx.server.interfaces import EngineClient, PromptRenderer, ServedModel
from mtplx.server.names import ModelNames
from mtplx.types import GenerationRequest, ModelInfo


@dataclass(frozen=True)
class Service:
    """The injected parts of the server, as one of its models needs them.

    Attributes:
        info, tokenizer: The model's.
    """

    engine: EngineClient
    tokenizer: PromptRenderer
    info: ModelInfo
    configuration: Configuration
    generations: Generations
    names: ModelNames

    @property
    def fingerprint(self) -> str:
        """The short form of the model's fingerprint that answers carry."""
        return f"fp_{self.info.fingerprint[:12]}"

    async def for_model(self, name: str | None) -> Service:
        """Return the service of the model that ``name`` means, once it is loaded. That is
        not given up when the client goes away: the next one has it sooner.

        Raises:
            ModelNotFoundError: There is none.
            ModelLoadError, ConfigError: It cannot be loaded.
            QueueFullError: It has no place beside those that are in use.
            EngineUnavailableError: The engine has stopped.
        """
        name = self.names.resolve(name)
        if name == self.info.name:
            return self
        model: ServedModel = await asyncio.wrap_future(self.engine.model(name))
        return replace(self, info=model.info, tokenizer=model.tokenizer)

    def check_token_id(self, value: object, param: str) -> None:
        """Raise ``InvalidRequestError`` unless ``value`` is in the vocabulary."""
        size = self.info.vocab_size
        if type(value) is not int or not 0 <= value < size:
            raise InvalidRequestError(
                f"`{param}` must be a token id from 0 to {size - 1}.", param=param
            )

    def check_logit_bias(self, bias: Iterable[str]) -> None:
        """Raise ``InvalidRequestError`` unless all its keys are in the vocabulary."""
        for token_id in bias:
            self.check_token_id(int(token_id), "logit_bias")

    def answer_tokens(self, wanted: int | None, prompt_tokens: int, param: str) -> int:
        """Return the most tokens an answer may have.

        Args:
            wanted: What the request says; None leaves it to the server.
            prompt_tokens: Length of the prompt.
            param: The field the prompt came from, for errors.

        Raises:
            InvalidRequestError: The prompt has no tokens.
            ContextLengthError: It leaves no room for an answer.
        """
        limit = self.info.context_length
        if prompt_tokens == 0:
            raise InvalidRequestError(f"`{param}` renders to no tokens.", param=param)
        if prompt_tokens >= limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, your "
                f"{param} resulted in {prompt_tokens} tokens. Please shorten the {param}.",
                param=param,
            )
        if wanted is None:
            wanted = self.configuration.settings.max_tokens
        room = limit - prompt_tokens
        return room if wanted is None else min(wanted, room)

    def deadline_s(self, http: Request, after_s: float | None) -> float | None:
        """Return when a request that may take ``after_s`` is to be given up."""
        return None if after_s is None else RequestRecord.of(http).arrival_s + after_s

    def text_of(self, token_ids: Iterable[int]) -> str:
        """Return what these tokens say; broken characters are U+FFFD."""
        raw = b"".join(self.tokenizer.token_bytes(each) for each in token_ids)
        return raw.decode(errors="replace")

    def namespace(self, http: Request, prompt_cache_key: str | None) -> str:
        """Return whose KV state this request shares, as `cache_isolation` says."""
        match self.configuration.settings.cache_isolation:
            case "api-key":
                owner = RequestRecord.of(http).api_key_id
            case "prompt-cache-key":
                owner = prompt_cache_key
            case "none":
                owner = None
        # A digest, because the name goes into files and must tell nobody the key.
        return "" if owner is None else hashlib.sha256(owner.encode()).hexdigest()[:32]

    def generation(
        self, http: Request, requests: Sequence[GenerationRequest]
    ) -> Generation:
        """Return the generation that answers ``http`` with this model, not yet submitted.

        Raises:
            InvalidRequestError: It has more answers than requests may ever wait.
        """
        most = self.configuration.settings.max_queue
        if len(requests) > most:
            raise InvalidRequestError(
                f"This asks for {len(requests)} answers at once; send at most {most} "
                "(prompts times `n`), or start the server with a larger --max-queue."
            )
        record = RequestRecord.of(http)
        record.model = self.info.name
        requests = [replace(request, model=self.info.name) for request in requests]
        return Generation(self.generations, requests, http.receive, record)
