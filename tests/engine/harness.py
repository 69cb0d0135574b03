"""What the engine's tests share: a client, a network with manners, and requests."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn

from mtplx.generation import restore_or_prefill_prompt_state
from mtplx.models import Model
from mtplx.types import (
    GenerationRequest,
    PrefillProgress,
    Prompt,
    SamplingParams,
    TextDelta,
)
from tests.tiny_models import chat_model

GREEDY = SamplingParams(temperature=0)
PROMPT = [(7 * i) % 250 + 5 for i in range(60)]
TIMEOUT_S = 60


@dataclass
class Client:
    """Collects one request's events."""

    events: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    progress: list[PrefillProgress] = field(default_factory=list)

    def __call__(self, event):
        self.events.put(event)

    def next(self):
        event = self.events.get(timeout=TIMEOUT_S)
        while isinstance(event, PrefillProgress):
            self.progress.append(event)
            event = self.events.get(timeout=TIMEOUT_S)
        if isinstance(event, TextDelta):
            self.tokens += event.token_ids
            self.text += event.text
        return event

    def end(self):
        """Read up to the terminal event, which must be the last one."""
        while isinstance(event := self.next(), TextDelta):
            pass
        assert self.events.empty()
        return event


class TouchyNetwork(nn.Module):
    """A network that a test can hold up, and that fails on a token of its choice.

    ``entered`` gets the shape of each forward that has a cache, before it may go on.
    """

    def __init__(self, network, *, raises_on=None, nan_on=None):
        super().__init__()
        self.network = network
        self.gate = threading.Event()
        self.gate.set()
        self.entered = queue.SimpleQueue()
        self._raises_on = raises_on
        self._nan_on = nan_on

    def __call__(self, inputs, cache=None):
        rows = inputs.tolist()
        if cache is not None:
            self.entered.put(inputs.shape)
            assert self.gate.wait(TIMEOUT_S)
        if any(self._raises_on in row for row in rows):
            raise RuntimeError("no room for this tensor")
        logits = self.network(inputs, cache=cache)
        broken = mx.array([self._nan_on in row for row in rows])
        return mx.where(broken[:, None, None], mx.nan, logits)

    @property
    def layers(self):
        return self.network.layers

    def hold_up(self):
        """Close the gate; from here on ``entered`` tells of held up forwards only."""
        while not self.entered.empty():
            self.entered.get()
        self.gate.clear()


def touchy(**arguments):
    """Return such a network and the model around it."""
    plain = chat_model()
    network = TouchyNetwork(plain.network, **arguments)
    return network, Model(network, plain.config, plain.tokenizer)


def request(prompt, *, request_id="a", tokens=12, sampling=GREEDY, ignore_eos=True, **more):
    return GenerationRequest(
        request_id=request_id,
        prompt=Prompt(tuple(prompt)),
        max_new_tokens=tokens,
        arrival_s=time.perf_counter(),
        sampling=sampling,
        ignore_eos=ignore_eos,
        **more,
    )


def run(engine, *arguments, **more):
    client = Client()
    engine.submit(request(*arguments, **more), client)
    return client, client.end()


def greedy_reference(prompt, tokens, model=None):
    """Return what the plain loop gives for one request alone."""
    model = model or chat_model()
    state = restore_or_prefill_prompt_state(token_ids=prompt, model=model)
    return mx.argmax(model.decode(state.cache, tokens), axis=-1).tolist()
