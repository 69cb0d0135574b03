"""What the generating routes share between a valid body and the engine.

Decides what depends on the model: its names, and the room its context leaves for the
answer. Owns nothing that changes but the registry of open generations. Runs on the event
loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from mtplx.config import Configuration
from mtplx.errors import ContextLengthError, InvalidRequestError, ModelNotFoundError
from mtplx.server.access import RequestRecord
from mtplx.server.handle import Generation, Generations
from mtplx.server.interfaces import EngineClient, PromptRenderer
from mtplx.types import GenerationRequest, ModelInfo

# What clients that cannot be told a name send; any model answers to these.
ALIASES = ("claude-", "gpt-")


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
        """Raise ``ModelNotFoundError`` unless ``name`` is absent, or served here under
        this name or as an alias."""
        if name is None or name == self.info.name or name.startswith(ALIASES):
            return
        raise ModelNotFoundError(
            f"The model {name[:200]!r} is not served here; use {self.info.name!r}.",
            param="model",
        )

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
        """Return the generation that answers ``http``, not yet submitted.

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
        return Generation(self.generations, requests, http.receive, record)
