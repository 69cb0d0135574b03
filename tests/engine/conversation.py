"""Conversations through a real engine and tokenizer, as a server would hold them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.text.lark import lark_text, literal
from mtplx.types import Finished, GenerationRequest, Prompt, SamplingParams
from tests.engine.harness import Client
from tests.text.tokenizers_factory import CHATML, assistant, make_wrapper
from tests.tiny_models import CONFIGS, make_network

KINDS = ("llama", "gemma3_text", "qwen3_next")
"""Dense attention, sliding windows, gated delta net."""

RESUME_TOKENS = 32
"""Most tokens that a model with recurrent layers computes again to resume."""

_numbers = count()


@cache
def chat_model_of(model_type: str, template: str = CHATML, **changes: Any) -> Model:
    """Return a tiny model that speaks the test tokenizer's tokens."""
    wrapper = make_wrapper("byte_level", template=template)
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
    config = {**CONFIGS[model_type], **sizes, "vocab_size": len(wrapper), **changes}
    return Model(make_network(config), config, wrapper, name=f"chat-{model_type}")


def prompt_of(tokens: int, salt: int = 0) -> Prompt:
    """Return a prompt without edges, another one for each salt."""
    return Prompt(tuple((11 * i * i + 7 * salt + i) % 250 + 5 for i in range(tokens)))


@contextlib.contextmanager
def running(
    model: Model, tier: DiskTier | None = None, **settings: Any
) -> Iterator[Engine]:
    """Run an engine until the block ends; it must leave nothing behind."""
    effective = Settings(**settings)
    bank = SessionBank(effective.max_kv_size, max_bytes=effective.kv_bytes)
    engine = Engine(lambda: model, bank, effective, tier)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
    assert bank.pinned == 0
    bank.check()


@dataclass
class Turn:
    """A prompt and what came of it."""

    prompt: Prompt
    tokens: list[int]
    text: str
    end: Finished

    @property
    def cached(self) -> int:
        return self.end.metrics.cached_tokens

    @property
    def computed(self) -> int:
        return self.end.metrics.new_prefill_tokens

    @property
    def token_ids(self) -> list[int]:
        """All that was read or generated."""
        return [*self.prompt.token_ids, *self.tokens]


@dataclass
class Chat:
    """A client that sends the whole conversation with each turn."""

    engine: Engine
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Sequence[dict[str, Any]] = ()

    def ask(
        self,
        *messages: dict[str, Any],
        tokens: int = 12,
        says: str | None = None,
        reply: dict[str, Any] | None = None,
        **more: Any,
    ) -> Turn:
        """Send more messages and keep the answer, as the server does.

        Args:
            messages: What is new.
            tokens: Length of the answer.
            says: What the model is made to say; None lets it.
            reply: How the answer reaches the client; its text where None.
        """
        self.messages += messages
        tokenizer = self.engine.tokenizer
        prompt = tokenizer.render_chat(self.messages, tools=self.tools)
        turn = generate(self.engine, prompt, tokens=tokens, says=says, **more)
        reply = assistant(turn.text) if reply is None else reply
        tokenizer.remember(prompt, turn.tokens, reply)
        self.messages.append(reply)
        return turn


def request_for(
    engine: Engine,
    prompt: Prompt,
    *,
    tokens: int = 12,
    says: str | None = None,
    **more: Any,
) -> GenerationRequest:
    """Return a greedy request. Special tokens are not drawn: a client can't echo them."""
    tokenizer = engine.tokenizer
    special = tokenizer.encode("<|bos|><|im_start|><|im_end|>", add_special_tokens=False)
    sampling = SamplingParams(temperature=0, logit_bias=tuple((t, -1e9) for t in special))
    if says is not None:
        expression = literal(says, tokenizer.answer_format.tokens)
        more["grammar"] = lark_text(f"start: {expression}")
        sampling, tokens = SamplingParams(temperature=0), 4 * len(says)
    return GenerationRequest(
        request_id=f"request {next(_numbers)}",
        prompt=prompt,
        max_new_tokens=tokens,
        arrival_s=time.perf_counter(),
        sampling=sampling,
        **more,
    )


def generate(engine: Engine, prompt: Prompt, **more: Any) -> Turn:
    """Run one request to its end."""
    client = Client()
    engine.submit(request_for(engine, prompt, **more), client)
    end = client.end()
    assert isinstance(end, Finished), end
    return Turn(prompt, client.tokens, client.text, end)


def cold_tokens(model: Model, turns: Sequence[Turn]) -> list[list[int]]:
    """Return what an engine that keeps nothing answers to the same prompts."""
    with running(model, max_kv_size=0) as engine:
        cold = [generate(engine, t.prompt, tokens=len(t.tokens)) for t in turns]
    assert all(turn.cached == 0 for turn in cold)
    return [turn.tokens for turn in cold]


def common_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
