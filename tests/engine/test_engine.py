"""The engine with a tiny real model: what comes out, and that nothing stays behind."""

from __future__ import annotations

import threading

import pytest

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.errors import (
    EngineUnavailableError,
    GenerationError,
    ModelLoadError,
    QueueFullError,
)
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Failed, Finished, SamplingParams
from tests.engine.harness import (
    PROMPT,
    TIMEOUT_S,
    Client,
    greedy_reference,
    request,
    run,
    touchy,
)
from tests.tiny_models import chat_model


def test_greedy_tokens_are_those_of_the_plain_loop(start):
    client, end = run(start(prefill_window=16), PROMPT)
    assert client.tokens == greedy_reference(PROMPT, 12)
    assert client.text == Tokenizer(chat_model().tokenizer).decode(client.tokens)
    assert (end.reason, end.completion_tokens) == ("length", 12)
    assert end.metrics.prefill_chunks == 4
    assert end.metrics.prefill_chunk_size == 16
    assert end.metrics.cached_tokens == 0
    assert end.metrics.cache_miss_reason == "never_seen"
    assert 0 < end.metrics.prefill_s <= end.metrics.ttft_s


def test_the_next_turn_computes_only_what_is_new_and_answers_like_a_cold_engine(start):
    warm = start()
    first, _ = run(warm, PROMPT)
    turn = [*PROMPT, *first.tokens, 40, 41, 42]
    second, end = run(warm, turn)
    # The last token of an answer is sampled and never read.
    assert end.metrics.cached_tokens == len(PROMPT) + 11
    assert end.metrics.new_prefill_tokens == 4
    assert end.metrics.cache_source == "memory"
    cold, _ = run(start(), turn)
    assert second.tokens == cold.tokens


def test_an_end_token_stops_and_is_not_shown(start):
    engine = start()
    end_token = next(iter(engine.tokenizer.eos_token_ids))
    # A random model rarely ends: look for a prompt whose answer does.
    for shift in range(400):
        prompt = [(token + shift) % 250 + 5 for token in PROMPT[:8]]
        tokens = greedy_reference(prompt, 30)
        if end_token in tokens:
            break
    else:
        pytest.fail("no prompt of this model leads to the end token")
    client, end = run(engine, prompt, tokens=30, ignore_eos=False)
    assert end.reason == "stop"
    assert client.tokens == tokens[: tokens.index(end_token) + 1]
    assert client.text == engine.tokenizer.decode(client.tokens[:-1])


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(start):
    engine = start()
    whole, _ = run(engine, PROMPT, tokens=20)
    stop = whole.text[8:11]
    at = whole.text.index(stop)
    client, end = run(engine, PROMPT, tokens=20, stop=(stop,))
    assert end.reason == "stop"
    assert client.text == whole.text[:at]
    assert end.completion_tokens < 20


def test_a_seed_repeats_and_another_seed_differs(start):
    engine = start()

    def sampled(seed):
        sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=100, seed=seed)
        return run(engine, PROMPT, tokens=20, sampling=sampling)[0].tokens

    assert sampled(1) == sampled(1)
    assert len({tuple(sampled(seed)) for seed in (1, 2, 3)}) == 3


def test_metrics_of_a_repeated_prompt(start):
    engine = start()
    run(engine, PROMPT)
    _, end = run(engine, PROMPT)
    assert end.metrics.cached_tokens == len(PROMPT) - 1
    assert end.metrics.prefill_chunks == 1


def test_the_context_ends_an_answer(start):
    engine = start()
    prompt = [5] * (engine.info.context_length - 3)
    client, end = run(engine, prompt, tokens=50)
    assert (end.reason, len(client.tokens)) == ("length", 3)


def test_cancelled_while_it_decodes(start):
    engine = start()
    client = Client()
    engine.submit(request(PROMPT, tokens=500), client)
    client.next()
    engine.cancel("a")
    end = client.end()
    assert end.reason == "cancelled"
    assert end.completion_tokens == len(client.tokens) < 500
    # What it computed stays.
    _, again = run(engine, [*PROMPT, *client.tokens, 9], tokens=1)
    assert again.metrics.cached_tokens >= len(PROMPT) + len(client.tokens) - 1


def test_cancelled_between_two_spans_it_resumes_there(start):
    network, model = touchy()
    engine = start(model, prefill_window=16, max_num_seqs=1)
    client = Client()
    network.hold_up()
    engine.submit(request(PROMPT), client)
    assert network.entered.get(timeout=TIMEOUT_S) == (1, 16)
    engine.cancel("a")
    network.gate.set()
    assert client.end() == Finished("cancelled", 0, None)
    second, end = run(engine, PROMPT)
    assert end.metrics.cached_tokens == 16
    assert second.tokens == greedy_reference(PROMPT, 12)


def test_cancelled_while_it_waits(start):
    network, model = touchy()
    engine = start(model)
    network.hold_up()
    running, waiting = Client(), Client()
    engine.submit(request(PROMPT, request_id="running"), running)
    engine.submit(request(PROMPT, request_id="waiting"), waiting)
    engine.cancel("waiting")
    engine.cancel("unknown")
    network.gate.set()
    assert waiting.end() == Finished("cancelled", 0, None)
    assert running.end().reason == "length"


def test_a_full_queue_refuses(start):
    network, model = touchy()
    engine = start(model, max_queue=1, max_num_seqs=1)
    network.hold_up()
    clients = [Client(), Client()]
    engine.submit(request(PROMPT, request_id="0"), clients[0])
    network.entered.get(timeout=TIMEOUT_S)
    engine.submit(request(PROMPT, request_id="1"), clients[1])
    with pytest.raises(QueueFullError) as caught:
        engine.submit(request(PROMPT, request_id="2"), Client())
    assert caught.value.retry_after_s > 0
    network.gate.set()
    assert [client.end().reason for client in clients] == ["length", "length"]


def test_a_request_that_fails_fails_alone(start):
    _, model = touchy(raises_on=300)
    engine = start(model)
    _, failed = run(engine, [*PROMPT, 300])
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, GenerationError)
    assert "no room for this tensor" in str(failed.error)
    client, _ = run(engine, PROMPT)
    assert client.tokens == greedy_reference(PROMPT, 12)


def test_logits_that_are_not_numbers_are_an_error_and_not_a_token(start):
    _, model = touchy(nan_on=300)
    engine = start(model)
    client, failed = run(engine, [*PROMPT, 300])
    assert isinstance(failed, Failed)
    assert "not numbers" in str(failed.error)
    assert client.tokens == []
    assert engine.status().bank_tokens == 0, "what led there is not to be trusted"


def test_stopping_ends_every_request(start):
    network, model = touchy()
    engine = start(model)
    network.hold_up()
    clients = [Client(), Client()]
    for name, client in zip("ab", clients, strict=True):
        engine.submit(request(PROMPT, request_id=name), client)
    network.entered.get(timeout=TIMEOUT_S)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    network.gate.set()
    ends = [client.end() for client in clients]
    stopper.join(TIMEOUT_S)
    assert not stopper.is_alive()
    assert all(isinstance(end, Failed) for end in ends)
    assert all(isinstance(end.error, EngineUnavailableError) for end in ends)
    assert not engine.status().alive
    with pytest.raises(EngineUnavailableError):
        engine.submit(request(PROMPT), Client())


def test_a_model_that_cannot_be_loaded_is_the_callers_error():
    def load():
        raise ModelLoadError("There is no such model.")

    with pytest.raises(ModelLoadError, match="no such model"):
        Engine(load, SessionBank(), Settings()).start()


def test_many_dropped_requests_leave_nothing(start):
    engine = start(prefill_window=16)
    for number in range(50):
        client = Client()
        prompt = [(token + number) % 250 + 5 for token in PROMPT]
        engine.submit(request(prompt, request_id=str(number), tokens=200), client)
        if number % 2:
            client.next()
        engine.cancel(str(number))
        assert client.end().reason == "cancelled"
    status = engine.status()
    assert (status.waiting, status.running) == (0, 0)
