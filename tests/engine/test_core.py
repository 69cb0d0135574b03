"""Requests that run at once: each gets what it gets alone, whatever becomes of others."""

from __future__ import annotations

import dataclasses
import threading
import time
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mtplx.engine import core
from mtplx.errors import DeadlineExceededError, GenerationError, QueueFullError
from mtplx.generation import prefill
from mtplx.models import Model
from mtplx.scheduler.cost_model import StepCost
from mtplx.types import Failed, Finished, SamplingParams, TextDelta
from tests.engine.harness import (
    PROMPT,
    TIMEOUT_S,
    Client,
    greedy_reference,
    request,
    run,
)
from tests.text.tokenizers_factory import make_wrapper
from tests.tiny_models import CONFIGS, make_network

TOKENS = 8
PREFIX = PROMPT[:48]

MODELS = ("llama", "gemma3_text", "qwen3_next")
"""Dense attention, sliding windows, and layers with a recurrent state."""


def mixed(length: int, salt: int) -> list[int]:
    return [(11 * i * i + 7 * salt + i) % 250 + 5 for i in range(length)]


PROMPTS = {
    "one": [9],
    "few": mixed(5, 1),
    "window": mixed(16, 2),
    "more": mixed(33, 3),
    "long": mixed(130, 4),
    "first of a prefix": [*PREFIX, *mixed(9, 5)],
    "second of a prefix": [*PREFIX, *mixed(40, 6)],
    "prefix": PREFIX,
}

SETTINGS = {
    "default": {},
    "small windows": {"prefill_window": 16, "max_num_seqs": 8},
    "one at a time": {"prefill_window": 16, "max_num_seqs": 1},
    "one prompt at a time": {"max_num_partial_prefills": 1, "max_num_seqs": 8},
    "least budget": {"max_num_seqs": 8, "max_num_batched_tokens": 24},
    "impatient streams": {"target_itl_ms": 0.001, "tail_grid": 8},
    "patient streams": {"target_itl_ms": 1e6, "prefill_window": 7, "max_num_seqs": 4},
    "one prompt in small bites": {
        "long_prefill_token_threshold": 16,
        "prefill_window": 17,
    },
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
}


class Hooked(Client):
    """Does something on the engine thread when its ``count``-th delta from now comes."""

    def __init__(self, count=0, action=None):
        super().__init__()
        self.count, self.action = count, action

    def __call__(self, event):
        super().__call__(event)
        if isinstance(event, TextDelta) and self.count:
            self.count -= 1
            if not self.count:
                self.action()


class Controls:
    """Watches a network, holds it up, and makes it fail on a token.

    Unlike ``TouchyNetwork`` it is the network itself, so that spans can share a forward.

    Attributes:
        shapes: Of the forwards with a cache.
    """

    def __init__(self, network, *, raises_on=None, nan_on=None) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._gate = threading.Event()
        self._gate.set()
        self._held = threading.Event()
        self.raises_on = raises_on
        self.nan_on = nan_on
        kind = type(network)
        controls = self

        def call(self, inputs, cache=None):
            if cache is not None:
                controls.shapes.append(inputs.shape)
                controls.wait_at_the_gate()
            logits = kind.__call__(self, inputs, cache)
            return controls.meddle(inputs.tolist(), logits)

        network.__class__ = type(kind.__name__, (kind,), {"__call__": call})

    def meddle(self, rows, logits):
        if any(self.raises_on in row for row in rows):
            raise RuntimeError("no room for this tensor")
        count = logits.shape[0]
        if count < len(rows):  # A shared span leaves its last row only.
            rows = [*rows[: count - 1], rows[-1]]
        broken = mx.array([self.nan_on in row for row in rows])
        return mx.where(broken[:, None, None], mx.nan, logits)

    def wait_at_the_gate(self):
        if not self._gate.is_set():
            self._held.set()
            assert self._gate.wait(TIMEOUT_S)

    def hold_up(self, engine, **asked) -> Hooked:
        """Start a request, and hold up the forward that follows its first token."""
        client = Hooked(1, self._gate.clear)
        engine.submit(request(**asked), client)
        assert self._held.wait(TIMEOUT_S)
        self.shapes.clear()
        return client

    def let_go(self) -> None:
        self._gate.set()


def speaking(model_type: str) -> Model:
    wrapper = make_wrapper("byte_level")
    config = {**CONFIGS[model_type], "num_hidden_layers": 2, "vocab_size": len(wrapper)}
    return Model(make_network(config), config, wrapper, name=f"speaking-{model_type}")


@cache
def shared_model(model_type: str) -> Model:
    return speaking(model_type)


def controlled(model_type: str = "llama", **arguments) -> tuple[Controls, Model]:
    model = speaking(model_type)
    return Controls(model.network, **arguments), model


@cache
def alone(model_type: str, prompt: tuple[int, ...], tokens: int = TOKENS) -> list[int]:
    """Return the greedy tokens of a request that nobody disturbs."""
    return greedy_reference(prompt, tokens, shared_model(model_type))


def references(model_type: str) -> dict[str, list[int]]:
    """Compute them all before an engine runs: hooks are not for two threads."""
    return {name: alone(model_type, tuple(prompt)) for name, prompt in PROMPTS.items()}


def unused(answers: list[list[int]]) -> int:
    """Return a token that no prompt and none of these answers contains."""
    return next(t for t in range(255, 400) if not any(t in tokens for tokens in answers))


def submit(engine, prompts=PROMPTS, tokens=TOKENS, **more) -> dict[str, Client]:
    clients = {name: Client() for name in prompts}
    for name, prompt in prompts.items():
        asked = request(prompt, request_id=name, tokens=tokens, **more)
        engine.submit(asked, clients[name])
    return clients


# -- the same tokens as alone ---------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("llama", name) for name in SETTINGS]
    + [
        (model_type, name)
        for model_type in MODELS[1:]
        for name in ("small windows", "one at a time", "impatient streams", "whole prompts")
    ],
)
def test_many_at_once_get_the_tokens_they_get_alone(start, model_type, settings):
    expected = references(model_type)
    engine = start(shared_model(model_type), **SETTINGS[settings])
    clients = submit(engine)
    ends = {name: client.end() for name, client in clients.items()}
    assert {name: client.tokens for name, client in clients.items()} == expected
    for name, end in ends.items():
        assert (end.reason, end.completion_tokens) == ("length", TOKENS)
        assert end.metrics.prompt_tokens == len(PROMPTS[name])
        if window := SETTINGS[settings].get("prefill_window"):
            assert end.metrics.prefill_chunk_size <= window
    engine.stop()
    assert all(client.events.empty() for client in clients.values()), "one end each"


@pytest.mark.parametrize("settings", ["small windows", "whole prompts"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_restored_prefix_changes_nothing(start, model_type, settings):
    expected = references(model_type)
    engine = start(shared_model(model_type), **SETTINGS[settings])
    run(engine, PREFIX, tokens=1)
    clients = submit(engine)
    ends = {name: client.end() for name, client in clients.items()}
    assert {name: client.tokens for name, client in clients.items()} == expected
    for name in ("first of a prefix", "second of a prefix"):
        assert ends[name].metrics.cached_tokens == len(PREFIX)
        assert ends[name].metrics.new_prefill_tokens == len(PROMPTS[name]) - len(PREFIX)
        assert ends[name].metrics.cache_source == "memory"
    assert ends["long"].metrics.cached_tokens == 0


@pytest.mark.parametrize("model_type", MODELS)
def test_prompts_that_join_while_others_stream(start, model_type):
    """One by one, each when the first stream has got another token."""
    expected = references(model_type)
    first = alone(model_type, tuple(PROMPT), 40)
    controls, model = controlled(model_type)
    engine = start(model, prefill_window=16)
    clients = {name: Client() for name in PROMPTS}
    names = iter(PROMPTS)
    stream = Hooked()

    def next_one():
        if name := next(names, None):
            asked = request(PROMPTS[name], request_id=name, tokens=TOKENS)
            engine.submit(asked, clients[name])
            stream.count = 1

    stream.count, stream.action = 1, next_one
    controls.shapes.clear()
    engine.submit(request(PROMPT, request_id="stream", tokens=40), stream)
    assert stream.end().reason == "length"
    assert stream.tokens == first
    assert [client.end().reason for client in clients.values()] == ["length"] * 8
    assert {name: client.tokens for name, client in clients.items()} == expected
    rows = [rows for rows, length in controls.shapes if length == 1]
    assert max(rows) > 1, "streams shared a forward"
    # More rows than requests: a span came along.
    assert (max(rows) > 1 + len(clients)) == (model_type != "qwen3_next")


@pytest.mark.parametrize("model_type", MODELS)
def test_a_seed_gives_the_same_in_any_company(start, model_type):
    sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=100, seed=7)
    engine = start(shared_model(model_type), prefill_window=16)
    by_itself, _ = run(engine, PROMPTS["more"], tokens=20, sampling=sampling)
    others = submit(engine, tokens=20, sampling=SamplingParams(seed=1))
    mine = Client()
    wanted = request(PROMPTS["more"], request_id="mine", tokens=20, sampling=sampling)
    engine.submit(wanted, mine)
    mine.end()
    assert mine.tokens == by_itself.tokens
    assert [client.end().reason for client in others.values()] == ["length"] * 8
    assert others["more"].tokens != mine.tokens


# -- what is reported -----------------------------------------------------------


def test_a_prompt_read_beside_a_stream_makes_it_wait(start):
    controls, model = controlled()
    engine = start(model, prefill_window=16)
    prompt = Client()
    stream = controls.hold_up(engine, prompt=PROMPT, request_id="stream", tokens=400)
    engine.submit(request(PROMPTS["long"], request_id="prompt"), prompt)
    controls.let_go()
    after = prompt.end()
    engine.cancel("stream")
    before = stream.end()
    assert max(rows for rows, _ in controls.shapes) > 2, "a span shared the forward"
    assert after.stream.stall_caused_s > 0
    assert after.stream.stall_suffered_s == 0
    assert before.stream.stall_suffered_s > 0
    assert before.stream.stall_caused_s == 0
    assert before.stream.stall_suffered_s == pytest.approx(after.stream.stall_caused_s)
    assert after.metrics.prefill_chunks >= len(PROMPTS["long"]) / 16
    assert after.stream.itl_target_s > 0
    for end in (after, before):
        assert 0 < end.stream.itl_p50_s <= end.stream.itl_p99_s <= end.stream.itl_worst_s
        assert 0 <= end.stream.itl_misses < end.completion_tokens


def test_a_stream_whose_last_token_came_with_a_span_has_waited_too(start):
    controls, model = controlled()
    engine = start(model, prefill_window=16)
    # Its second token is held up; the third and last one shares a forward.
    stream = controls.hold_up(engine, prompt=PROMPT, request_id="stream", tokens=3)
    prompt = Client()
    engine.submit(request(PROMPTS["long"], request_id="prompt"), prompt)
    controls.let_go()
    end = stream.end()
    assert prompt.end().stream.stall_caused_s > 0
    assert controls.shapes[0] == (1 + 16, 1)
    assert end.stream.stall_suffered_s > 0


def test_alone_nobody_waits(start):
    _, end = run(start(prefill_window=16), PROMPT)
    assert (end.stream.stall_caused_s, end.stream.stall_suffered_s) == (0, 0)
    assert end.stream.itl_worst_s > 0


def test_one_token_has_no_gaps(start):
    engine = start()
    _, end = run(engine, PROMPT, tokens=1)
    assert end.metrics.ttft_s > 0
    gaps = (end.stream.itl_p50_s, end.stream.itl_p99_s, end.stream.itl_worst_s)
    assert gaps == (None, None, None)
    assert end.stream.itl_misses == 0
    assert engine.status().itl.gaps == 0


def test_the_status_tells_what_happened(start):
    engine = start(shared_model("llama"), prefill_window=16)
    fresh = engine.status()
    assert fresh.alive
    assert (fresh.iterations, fresh.itl.gaps, fresh.bank_tokens) == (0, 0, 0)
    assert (fresh.batch_mode, fresh.batch_fallback_reason) == ("packed", None)
    assert (fresh.chunked_prefill, fresh.chunked_prefill_reason) == (True, None)
    clients = submit(engine)
    ends = [client.end() for client in clients.values()]
    # An iteration ends after its events; the next request is behind it.
    run(engine, [7], tokens=1)
    status = engine.status()
    assert status.itl.gaps == sum(end.completion_tokens - 1 for end in ends)
    assert status.itl.worst_s == max(end.stream.itl_worst_s for end in ends)
    assert status.itl.misses == sum(end.stream.itl_misses for end in ends)
    assert TOKENS <= status.iterations < len(PROMPTS) * (TOKENS + 10)
    assert set(status.step_cost) == set(asdict(StepCost()))
    assert status.step_cost != fresh.step_cost
    assert status.bank_tokens >= len(PROMPTS["long"]) + TOKENS - 1


# -- failures -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raises_on", "nan_on"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_prompt_that_fails_fails_alone(start, model_type, how):
    expected = references(model_type)
    stream = alone(model_type, tuple(PROMPT), 40)
    poison = unused([*expected.values(), stream])
    controls, model = controlled(model_type, **{how: poison})
    engine = start(model, prefill_window=16)
    run(engine, PREFIX, tokens=1)  # What is restored must be let go of, too.
    held = controls.hold_up(engine, prompt=PROMPT, request_id="stream", tokens=40)
    clients = {"stream": held, "bad": Client()}
    bad = [*PREFIX, *mixed(40, 8), poison]
    engine.submit(request(bad, request_id="bad"), clients["bad"])
    clients |= submit(engine)
    controls.let_go()
    failed = clients.pop("bad").end()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, GenerationError)
    text = {"raises_on": "no room for this tensor", "nan_on": "not numbers"}[how]
    assert text in str(failed.error)
    assert [client.end().reason for client in clients.values()] == ["length"] * 9
    assert clients.pop("stream").tokens == stream
    assert {name: client.tokens for name, client in clients.items()} == expected
    assert engine.status().batch_mode == "packed"
    assert engine.status().batch_fallback_reason is None


@pytest.mark.parametrize("how", ["raises_on", "nan_on"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_stream_that_fails_fails_alone(start, model_type, how):
    expected = references(model_type)
    name, at = next(
        (name, at)
        for name, tokens in expected.items()
        for at, token in enumerate(tokens[1:-1], 1)
        if token not in tokens[:at]
        and all(token not in PROMPTS[n] for n in PROMPTS)
        and all(token not in expected[n] for n in PROMPTS if n != name)
    )
    controls, model = controlled(model_type)
    engine = start(model, prefill_window=16)
    # Not before: the engine tries its model on tokens of its own.
    setattr(controls, how, expected[name][at])
    clients = submit(engine)
    failed = clients[name].end()
    assert isinstance(failed, Failed)
    assert clients.pop(name).tokens == expected[name][: at + 1]
    assert [client.end().reason for client in clients.values()] == ["length"] * 7
    assert all(client.tokens == expected[name] for name, client in clients.items())


@pytest.mark.parametrize(
    ("model_type", "edges", "kept"),
    [("llama", (), 80), ("gemma3_text", (24, 64), 64), ("qwen3_next", (24, 64), 64)],
)
def test_a_prompt_that_failed_resumes_where_its_state_was_kept(
    start, model_type, edges, kept
):
    prompt = mixed(100, 8)
    expected = alone(model_type, tuple(prompt))
    poison = unused([expected])
    controls, model = controlled(model_type, raises_on=poison)
    engine = start(model, prefill_window=16, max_num_seqs=1)
    wrong = [*prompt[:90], poison, *prompt[91:]]

    def ask(tokens):
        asked = request(tokens, tokens=TOKENS)
        client = Client()
        with_edges = dataclasses.replace(asked.prompt, edges=edges)
        engine.submit(dataclasses.replace(asked, prompt=with_edges), client)
        return client, client.end()

    _, failed = ask(wrong)
    assert isinstance(failed, Failed)
    client, end = ask(prompt)
    assert end.metrics.cached_tokens == kept
    assert client.tokens == expected
    # The very same prompt, once the trouble is over.
    controls.raises_on = None
    _, end = ask(wrong)
    assert end.metrics.cached_tokens == (90 if model_type == "llama" else kept)


def test_a_snapshot_that_cannot_be_taken_is_its_requests_trouble_alone(start, monkeypatch):
    expected = alone("gemma3_text", tuple(PROMPT), 40)
    controls, model = controlled("gemma3_text")
    engine = start(model, prefill_window=16)
    stream = controls.hold_up(engine, prompt=PROMPT, request_id="stream", tokens=40)

    def no_room(cache):
        raise RuntimeError("no room for this snapshot")

    monkeypatch.setattr(prefill, "take_snapshot", no_room)
    client = Client()
    engine.submit(request(PROMPTS["few"], request_id="prompt"), client)
    controls.let_go()
    failed = client.end()
    assert isinstance(failed, Failed)
    assert "no room for this snapshot" in str(failed.error)
    assert stream.end().reason == "length"
    assert stream.tokens == expected
    assert engine.status().alive


# -- cancels, deadlines, the queue ----------------------------------------------


@pytest.mark.parametrize("model_type", MODELS)
def test_cancelled_in_any_state_the_others_go_on(start, model_type):
    expected = alone(model_type, tuple(PROMPT), 40)
    controls, model = controlled(model_type)
    engine = start(model, prefill_window=16, max_num_seqs=3, max_num_batched_tokens=3 + 16)
    decoding, prefilling, waiting = Client(), Client(), Client()
    engine.submit(request(PROMPTS["few"], request_id="decoding", tokens=500), decoding)
    stays = controls.hold_up(engine, prompt=PROMPT, request_id="stays", tokens=40)
    engine.submit(request(PROMPTS["long"], request_id="prefilling"), prefilling)
    engine.submit(request(PROMPTS["more"], request_id="waiting"), waiting)
    engine.cancel("waiting")

    def give_up():
        engine.cancel("prefilling")
        engine.cancel("decoding")

    # The first delta is that of the step before the gate, the second comes with a span.
    stays.count, stays.action = 2, give_up
    controls.let_go()
    assert waiting.end() == Finished("cancelled", 0, None)
    assert prefilling.end() == Finished("cancelled", 0, None)
    end = decoding.end()
    assert end.reason == "cancelled"
    assert end.completion_tokens == len(decoding.tokens) < 500
    assert end.metrics.prompt_tokens == 5
    assert end.stream.stall_suffered_s > 0
    assert stays.end().reason == "length"
    assert stays.tokens == expected
    # What was read of the prompt is there for the next one.
    again, end = run(engine, PROMPTS["long"], tokens=TOKENS)
    assert end.metrics.cached_tokens == 16
    assert again.tokens == alone(model_type, tuple(PROMPTS["long"]))


def test_deadlines_end_what_waits_what_is_read_and_what_streams(start, monkeypatch):
    later_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + later_s[0])
    monkeypatch.setattr(core, "time", clock)
    expected = alone("llama", tuple(mixed(140, 9)))
    controls, model = controlled()
    engine = start(model, prefill_window=16, max_num_seqs=2, max_num_batched_tokens=2 + 16)
    soon_s = time.perf_counter() + 1000
    read, waits, patient = Client(), Client(), Client()
    streams = controls.hold_up(
        engine, prompt=PROMPT, request_id="streams", tokens=800, deadline_s=soon_s
    )
    long = PROMPTS["long"]
    engine.submit(request(long, request_id="read", deadline_s=soon_s), read)
    engine.submit(request(long, request_id="waits", deadline_s=soon_s), waits)
    last = request(mixed(140, 9), request_id="patient", tokens=TOKENS)
    engine.submit(last, patient)

    def let_time_pass():
        later_s[0] = 2000.0

    # The second delta from here comes with a span of "read".
    streams.count, streams.action = 2, let_time_pass
    controls.let_go()
    for client in (streams, read, waits):
        end = client.end()
        assert isinstance(end, Failed)
        assert isinstance(end.error, DeadlineExceededError)
    assert streams.tokens
    assert waits.tokens == []
    assert patient.end().reason == "length"
    assert patient.tokens == expected
    # What was read is kept, as the error says.
    _, end = run(engine, long, tokens=1)
    assert end.metrics.cached_tokens == 16
    whole = [*PROMPT, *streams.tokens[:-1]]
    _, end = run(engine, [*whole, 9], tokens=1)
    assert end.metrics.cached_tokens == len(whole)


def test_a_deadline_that_has_passed_already(start):
    engine = start()
    client, end = run(engine, PROMPT, deadline_s=time.perf_counter() - 1)
    assert isinstance(end, Failed)
    assert isinstance(end.error, DeadlineExceededError)
    assert client.tokens == []
    again, _ = run(engine, PROMPT, tokens=3, deadline_s=time.perf_counter() + 1000)
    assert len(again.tokens) == 3


def test_a_full_queue_refuses_and_the_rest_is_served(start):
    expected = references("llama")
    controls, model = controlled()
    engine = start(model, max_num_seqs=2, max_queue=6)
    stream = controls.hold_up(engine, prompt=PROMPT, request_id="stream", tokens=400)
    # One seat is free, and six may wait beyond it.
    names = [*PROMPTS][:7]
    clients = submit(engine, {name: PROMPTS[name] for name in names})
    refused = Client()
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request(PROMPT, request_id="refused"), refused)
    assert 1 <= caught.value.retry_after_s <= 60
    assert engine.status().waiting == 7
    controls.let_go()
    engine.cancel("stream")
    for name in names:
        assert clients[name].end().reason == "length"
        assert clients[name].tokens == expected[name]
    assert stream.end().reason == "cancelled"
    assert refused.events.empty()


def test_a_crowd_that_comes_and_goes_leaves_nothing(start):
    """Every third is cancelled at some point of its life; the others are exact."""
    expected = references("llama")
    engine = start(shared_model("llama"), prefill_window=16, max_num_seqs=6)
    clients = []
    for number in range(24):
        name = [*PROMPTS][number % len(PROMPTS)]
        client = Client()
        clients.append((number, name, client))
        asked = request(PROMPTS[name], request_id=str(number), tokens=TOKENS)
        engine.submit(asked, client)
        if number % 3 == 2:
            if number % 2:
                client.next()
            engine.cancel(str(number))
    for number, name, client in clients:
        end = client.end()
        if number % 3 == 2:
            assert client.tokens == expected[name][: len(client.tokens)]
        else:
            assert end.reason == "length"
            assert client.tokens == expected[name]
    engine.stop()
    assert all(client.events.empty() for _, _, client in clients)
