"""What one request tells its client, in which order, and how it ends."""

from __future__ import annotations

import queue

import pytest

from mtplx.engine.running import RunningRequest
from mtplx.engine.sampling import draw_tokens
from mtplx.errors import UnsupportedFieldError
from mtplx.scheduler.step import Stall
from mtplx.session import SessionBank
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Finished, PrefillProgress, PromptLogprobs, TextDelta
from tests.engine.harness import PROMPT, TIMEOUT_S, Client, greedy_reference, request, run
from tests.engine.test_logprobs import SETTINGS, assert_scored
from tests.tiny_models import chat_model

SPANS = (16, 40, len(PROMPT))


def started(client, bank=None, **more):
    """Return a request that has started, without the engine around it."""
    model = chat_model()
    tokenizer = Tokenizer(model.tokenizer)
    wanted = request(PROMPT, **more)
    return RunningRequest(wanted, client, model, tokenizer, bank, window=16, tail_grid=8)


def read(running):
    """Read the prompt as the engine does, span by span."""
    running.tell_progress()
    for end in SPANS:
        running.prefill.run(end)
        running.tell_progress()


def events(client):
    """Return what was told up to the end."""
    told = []
    while not client.events.empty():
        told.append(client.next())
    return told


def test_progress_is_told_at_the_start_and_after_every_span():
    told = []
    read(started(told.append))
    assert told == [PrefillProgress(done, 0, len(PROMPT)) for done in (0, *SPANS)]


def test_the_scored_prompt_comes_once_and_before_the_answer():
    client = Client()
    running = started(client, tokens=1, logprobs=2, prompt_logprobs=True)
    read(running)
    logits = running.prefill.cache.logits[None]
    token = draw_tokens(logits, [running.draw()])
    running.accept(running.scored(logits, token, token).item(), None)
    running.finish(Stall())
    prompt, delta, end = events(client)
    assert isinstance(prompt, PromptLogprobs)
    assert prompt.tokens[0] is None
    assert_scored(prompt.tokens[1:], PROMPT[:1], PROMPT[1:], top=2)
    assert isinstance(delta, TextDelta)
    assert_scored(delta.logprobs, PROMPT, delta.token_ids, top=2)
    assert isinstance(end, Finished)
    assert end.reason == "length"


def test_a_request_for_no_tokens_ends_with_its_prompt():
    client = Client()
    running = started(client, tokens=0)
    assert running.only_reads
    assert not running.done
    read(running)
    assert running.done
    running.finish(Stall())
    (end,) = events(client)
    assert (end.reason, end.completion_tokens) == ("length", 0)
    assert end.metrics.prompt_tokens == len(PROMPT)
    assert end.metrics.ttft_s is None


def test_a_scored_prompt_is_read_whole_though_it_is_known():
    bank = SessionBank()
    known = started(Client(), bank)
    read(known)
    known.keep()
    known.prefill.release()
    client = Client()
    running = started(client, bank, tokens=0, prompt_logprobs=True)
    read(running)
    running.finish(Stall())
    prompt, end = events(client)
    assert_scored(prompt.tokens[1:], PROMPT[:1], PROMPT[1:], top=0)
    assert end.metrics.cached_tokens == 0
    running.prefill.release()
    again = started(Client(), bank)
    assert again.prefill.cache.offset > 0
    again.prefill.release()


def test_the_end_names_the_stop_string(start):
    engine = start()
    client, end = run(engine, PROMPT)
    assert end.stop_text is None
    stop = client.text[4:7]
    _, end = run(engine, PROMPT, stop=("never said", stop))
    assert (end.reason, end.stop_text) == ("stop", stop)


def test_a_grammar_is_refused_where_tokens_have_no_bytes():
    with pytest.raises(UnsupportedFieldError, match="grammar"):
        started(Client(), grammar="start: /a/")


# -- the engine -----------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("scored", [False, True])
def test_a_request_for_no_tokens_only_reads_beside_a_stream(start, settings, scored):
    engine = start(**settings)
    stream, client = Client(), Client()
    engine.submit(request(PROMPT[7:], request_id="stream", tokens=30), stream)
    engine.submit(request(PROMPT, tokens=0, prompt_logprobs=scored), client)
    if scored:
        prompt = client.next()
        assert_scored(prompt.tokens[1:], PROMPT[:1], PROMPT[1:], top=0)
    end = client.end()
    assert (end.reason, end.completion_tokens, client.tokens) == ("length", 0, [])
    stream.end()
    assert stream.tokens == greedy_reference(PROMPT[7:], 30)
    _, end = run(engine, PROMPT, tokens=2)
    assert end.metrics.cached_tokens > 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_progress_grows_up_to_the_prompt_and_comes_before_any_text(start, settings):
    engine = start(**settings)
    stream, told = Client(), queue.SimpleQueue()
    engine.submit(request(PROMPT[7:], request_id="stream", tokens=30), stream)
    engine.submit(request(PROMPT, tokens=3), told.put)
    done = []
    while isinstance(event := told.get(timeout=TIMEOUT_S), PrefillProgress):
        done.append(event.done_tokens)
    assert done == sorted(set(done))
    assert done[-1] == len(PROMPT)
    while not isinstance(event, Finished):
        assert isinstance(event, TextDelta)
        event = told.get(timeout=TIMEOUT_S)
    stream.end()
