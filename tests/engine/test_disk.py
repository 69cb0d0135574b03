"""What a server has read survives it: state restored from disk by the next one."""

from __future__ import annotations

import threading
import time

import pytest

from mtplx.errors import DeadlineExceededError, EngineUnavailableError
from mtplx.session.disk import DiskTier
from mtplx.types import Failed, Finished, Prompt
from tests.engine.conversation import (
    KINDS,
    RESUME_TOKENS,
    Chat,
    chat_model_of,
    cold_tokens,
    generate,
    prompt_of,
    request_for,
    running,
)
from tests.engine.harness import TIMEOUT_S, Client
from tests.text.tokenizers_factory import system, user
from tests.tiny_models import ANY_PREFIX

SYSTEM = system("You are a careful assistant. Answer in one sentence. " * 8)
QUESTION = user("What is the capital of France?")


def tier_in(folder, kind=DiskTier) -> DiskTier:
    return kind(folder, max_bytes=1 << 30, daily_write_bytes=1 << 40)


class HeldDisk(DiskTier):
    """A drive that reads, and keeps what it read to itself until it is let go."""

    def __init__(self, *arguments, **more) -> None:
        super().__init__(*arguments, **more)
        self.has_read = threading.Event()
        self.gate = threading.Event()

    def fetch(self, key, token_ids, start, on_done):
        def hold(fetched):
            self.has_read.set()
            assert self.gate.wait(TIMEOUT_S)
            on_done(fetched)

        super().fetch(key, token_ids, start, hold)


class SlowDisk(DiskTier):
    """A drive that is known to give a byte in a second."""

    def restore_seconds(self, key, token_ids, start):
        return 1e9 * super().restore_seconds(key, token_ids, start)


@pytest.fixture
def written(tmp_path):
    """A folder with the state of ``prompt_of(200)`` and its answer, and that answer."""
    model = chat_model_of("llama")
    with running(model, tier_in(tmp_path)) as engine:
        return tmp_path, generate(engine, prompt_of(200))


# -- restored -------------------------------------------------------------------


@pytest.mark.parametrize("model_type", [*KINDS, "mamba2", "deepseek_v3", "falcon_h1"])
def test_a_conversation_goes_on_after_a_restart(model_type, tmp_path):
    model = chat_model_of(model_type)
    with running(model, tier_in(tmp_path)) as engine:
        chat = Chat(engine, [SYSTEM])
        chat.ask(QUESTION)
        before = chat.ask(user("And of Italy?"))
    with running(model, tier_in(tmp_path)) as engine:
        prompt = Prompt((*before.token_ids, 7, 8, 9))
        forecast = engine.plan(prompt).result()
        turn = generate(engine, prompt)
        again = generate(engine, Prompt((*turn.token_ids, 7, 8, 9)))
        disk = engine.status().disk
    new_tokens = 3 + (1 if model_type in ANY_PREFIX else RESUME_TOKENS)
    assert turn.computed <= new_tokens
    assert turn.end.metrics.cache_source == "disk"
    assert forecast.disk_tokens == disk.restored_tokens == turn.cached
    assert again.computed <= new_tokens
    assert again.end.metrics.cache_source == "memory"
    assert [turn.tokens, again.tokens] == cold_tokens(model, [turn, again])


@pytest.mark.parametrize("model_type", KINDS)
def test_a_prefix_that_two_prompts_share_is_restored_for_a_third(model_type, tmp_path):
    model = chat_model_of(model_type)
    with running(model, tier_in(tmp_path)) as engine:
        for question in ("Hello!", "How old is the sea?"):
            Chat(engine, [SYSTEM]).ask(user(question))
        written = engine.status()
    with running(model, tier_in(tmp_path)) as engine:
        turn = Chat(engine, [SYSTEM]).ask(user("Write a line."))
        again = Chat(engine, [SYSTEM]).ask(user("Write two."))
    assert written.bank_tokens > 0
    assert turn.end.metrics.cache_source == "disk"
    assert turn.cached > 60
    assert again.cached >= turn.cached
    assert [turn.tokens, again.tokens] == cold_tokens(model, [turn, again])


def test_another_model_gets_nothing_of_it(written):
    folder, _ = written
    other = chat_model_of("llama", rope_theta=500.0)
    with running(other, tier_in(folder)) as engine:
        turn = generate(engine, prompt_of(200))
    assert turn.cached == 0
    assert [turn.tokens] == cold_tokens(other, [turn])


def test_a_short_prompt_is_not_worth_a_file(tmp_path):
    with running(chat_model_of("llama"), tier_in(tmp_path)) as engine:
        generate(engine, prompt_of(40))
    assert not [*(tmp_path / "segments").iterdir()]


# -- not restored ---------------------------------------------------------------


@pytest.mark.parametrize("model_type", KINDS)
def test_a_file_that_changed_is_computed_again(model_type, tmp_path):
    model = chat_model_of(model_type)
    with running(model, tier_in(tmp_path)) as engine:
        first = generate(engine, prompt_of(200))
    files = [*(tmp_path / "segments").iterdir()]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with running(model, tier_in(tmp_path)) as engine:
        again = generate(engine, prompt_of(200))
        assert engine.status().disk.quarantined > 0
    assert again.cached == 0
    assert again.tokens == first.tokens
    # What was computed has been written in place of it.
    with running(model, tier_in(tmp_path)) as engine:
        third = generate(engine, prompt_of(200))
    assert third.end.metrics.cache_source == "disk"
    assert third.tokens == first.tokens


def test_what_is_computed_faster_is_not_read(written):
    folder, first = written
    model = chat_model_of("llama")
    with running(model, tier_in(folder, SlowDisk)) as engine:
        forecast = engine.plan(prompt_of(200)).result()
        again = generate(engine, prompt_of(200))
        assert engine.status().disk.bytes_read == 0
    assert (forecast.disk_tokens, again.cached) == (0, 0)
    assert again.end.metrics.cache_source is None
    assert again.tokens == first.tokens


# -- while it is read -----------------------------------------------------------


def test_others_run_while_state_is_on_its_way(written):
    folder, first = written
    tier = tier_in(folder, HeldDisk)
    with running(chat_model_of("llama"), tier) as engine:
        waiting = Client()
        engine.submit(request_for(engine, prompt_of(200)), waiting)
        assert tier.has_read.wait(TIMEOUT_S)
        assert generate(engine, prompt_of(30, 1)).end.reason == "length"
        assert waiting.events.empty()
        tier.gate.set()
        end = waiting.end()
    assert end.metrics.cache_source == "disk"
    assert end.metrics.new_prefill_tokens == 1
    assert waiting.tokens == first.tokens


def test_cancelled_while_its_state_is_on_its_way(written):
    folder, first = written
    tier = tier_in(folder, HeldDisk)
    with running(chat_model_of("llama"), tier) as engine:
        client = Client()
        asked = request_for(engine, prompt_of(200))
        engine.submit(asked, client)
        assert tier.has_read.wait(TIMEOUT_S)
        engine.cancel(asked.request_id)
        assert client.end() == Finished("cancelled", 0, None)
        assert engine.status().waiting == 0
        tier.gate.set()
        # What was read is not wasted.
        again = generate(engine, prompt_of(200))
        assert client.events.empty()
    assert again.computed == 1
    assert again.tokens == first.tokens


def test_a_deadline_passes_while_state_is_on_its_way(written):
    folder, first = written
    tier = tier_in(folder, HeldDisk)
    with running(chat_model_of("llama"), tier) as engine:
        client = Client()
        asked = request_for(engine, prompt_of(200), deadline_s=time.perf_counter())
        engine.submit(asked, client)
        end = client.end()
        assert isinstance(end, Failed)
        assert isinstance(end.error, DeadlineExceededError)
        tier.gate.set()
        again = generate(engine, prompt_of(200))
        assert client.events.empty()
    assert again.tokens == first.tokens


def test_stopped_while_state_is_on_its_way(written):
    folder, _ = written
    tier = tier_in(folder, HeldDisk)
    with running(chat_model_of("llama"), tier) as engine:
        client = Client()
        engine.submit(request_for(engine, prompt_of(200)), client)
        assert tier.has_read.wait(TIMEOUT_S)
        stopper = threading.Thread(target=engine.stop)
        stopper.start()
        end = client.end()
        tier.gate.set()
        stopper.join(TIMEOUT_S)
    assert not stopper.is_alive()
    assert isinstance(end.error, EngineUnavailableError)
    tier_in(folder).close()  # The folder is free again.
