"""What state takes: once its bytes, within one budget, and who has to go."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, field

import mlx.core as mx
import pytest

from mtplx.engine import admission
from mtplx.errors import KVBudgetError
from mtplx.types import Finished, PrefillProgress, Prompt, TextDelta
from tests.engine.conversation import (
    chat_model_of,
    generate,
    prompt_of,
    request_for,
    running,
)
from tests.engine.harness import Client

SHARE = 1.3
"""Memory of a conversation in KV bytes of its tokens."""

STEP = 256
"""Buffers grow by this many tokens."""


def wide_model():
    """Return a model whose state is much larger than what it computes with."""
    return chat_model_of(
        "llama",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
    )


def settle(engine) -> None:
    """Wait until the engine has kept what the last request computed."""
    engine.plan(prompt_of(1)).result()


def held_bytes() -> int:
    gc.collect()
    return mx.get_active_memory()


@dataclass
class Scale(Client):
    """Weighs all of MLX's memory whenever its request makes a step."""

    before: int = 0
    shares: dict[str, list[float]] = field(default_factory=dict)
    row_bytes: int = 0
    tokens_held: int = 0

    def __call__(self, event):
        if isinstance(event, PrefillProgress):
            self.tokens_held = event.done_tokens
            self._weigh("prefill")
        elif isinstance(event, TextDelta):
            self._weigh("decode")
            self.tokens_held += 1
        super().__call__(event)

    def _weigh(self, what):
        if self.tokens_held:
            nbytes = mx.get_active_memory() - self.before
            rows_bytes = self.row_bytes * self.tokens_held
            self.shares.setdefault(what, []).append(nbytes / rows_bytes)


def test_a_conversation_takes_its_bytes_once():
    model = wide_model()
    with running(model, prefill_window=STEP) as engine:
        row_bytes = model.state_size.row_bytes
        before = held_bytes()
        known: tuple[int, ...] = ()
        for turn in range(2):
            prompt = Prompt((*known, *prompt_of(900, turn).token_ids))
            scale = Scale(before=before, row_bytes=row_bytes)
            engine.submit(request_for(engine, prompt, tokens=20), scale)
            end = scale.end()
            assert end.metrics.cached_tokens == max(len(known) - 1, 0), "it was borrowed"
            known = (*prompt.token_ids, *scale.tokens)
            assert len(scale.shares["prefill"]) > 3
            assert len(scale.shares["decode"]) == 20
            assert max(scale.shares["prefill"]) < SHARE
            assert max(scale.shares["decode"]) < SHARE
        settle(engine)
        assert held_bytes() - before < SHARE * row_bytes * len(known)
        held = engine.status().bank_bytes
        assert held == pytest.approx(held_bytes() - before, rel=0.05)


def test_conversations_that_share_a_prefix_share_its_memory():
    model = wide_model()
    shared = prompt_of(1000).token_ids
    with running(model) as engine:
        before = held_bytes()
        for salt in range(4):
            turn = generate(engine, Prompt((*shared, *prompt_of(100, salt).token_ids)))
            assert turn.cached == (1000 if salt else 0)
        settle(engine)
        row_bytes = model.state_size.row_bytes
        assert held_bytes() - before < SHARE * row_bytes * (1000 + 4 * 112)


# -- one budget -----------------------------------------------------------------


def with_room_for(tokens: int, **settings):
    """Run an engine whose budget is the state of that many tokens."""
    model = wide_model()
    return running(model, kv_bytes=model.state_size.nbytes(tokens), **settings)


def test_bank_and_running_requests_stay_within_one_budget():
    model = wide_model()
    limit = model.state_size.nbytes(5 * STEP)
    with running(model, kv_bytes=limit, prefill_window=64, max_num_seqs=8) as engine:
        before = held_bytes()
        most = 0

        class Watch(Client):
            def __call__(self, event):
                nonlocal most
                assert engine.status().bank_bytes <= limit
                most = max(most, mx.get_active_memory() - before)
                super().__call__(event)

        clients = [Watch() for _ in range(8)]
        for salt, client in enumerate(clients):
            engine.submit(request_for(engine, prompt_of(300, salt), tokens=40), client)
        assert [client.end().reason for client in clients] == ["length"] * 8
        settle(engine)
        assert 0 < engine.status().bank_bytes <= limit
        assert engine.status().bank_evictions > 0
    assert most < SHARE * limit


def test_a_prompt_that_never_fits_is_refused_at_once_with_the_numbers():
    model = wide_model()
    limit = model.state_size.nbytes(STEP)
    with running(model, kv_bytes=limit) as engine:
        nbytes = model.state_size.nbytes(STEP + 1)
        with pytest.raises(KVBudgetError) as caught:
            engine.submit(request_for(engine, prompt_of(STEP)), Client())
        for number in (STEP, nbytes, limit):
            assert str(number) in caught.value.message
        assert "--kv-bytes" in caught.value.message
        assert generate(engine, prompt_of(100), tokens=4).end.reason == "length"


def test_two_that_do_not_fit_together_run_one_after_the_other():
    told = []

    class Named(Client):
        def __call__(self, event):
            told.append((self, type(event)))
            super().__call__(event)

    with with_room_for(3 * STEP, prefill_window=64) as engine:
        clients = [Named(), Named()]
        for salt, client in enumerate(clients):
            engine.submit(request_for(engine, prompt_of(400, salt)), client)
        assert [client.end().reason for client in clients] == ["length"] * 2
    first_end = told.index((clients[0], Finished))
    assert all(client is clients[0] for client, _ in told[: first_end + 1])


def test_two_that_fit_together_run_together():
    with with_room_for(4 * STEP, prefill_window=64) as engine:
        most = 0

        class Watch(Client):
            def __call__(self, event):
                nonlocal most
                most = max(most, engine.status().running)
                super().__call__(event)

        clients = [Watch(), Watch()]
        for salt, client in enumerate(clients):
            engine.submit(request_for(engine, prompt_of(400, salt)), client)
        assert [client.end().reason for client in clients] == ["length"] * 2
    assert most == 2


def test_a_stream_that_uses_the_budget_up_ends_and_says_why(monkeypatch, caplog):
    monkeypatch.setattr(admission, "ANSWER_TOKENS", 8)
    with (
        caplog.at_level(logging.WARNING, "mtplx.engine"),
        with_room_for(2 * STEP) as engine,
    ):
        turn = generate(engine, prompt_of(200), tokens=2000)
        again = generate(engine, prompt_of(200, 1), tokens=4)
    assert turn.end.reason == again.end.reason == "length"
    # The last token is drawn, and not read.
    assert len(turn.token_ids) == 2 * STEP + 1
    (warning,) = [r for r in caplog.records if "KV budget" in r.message]
    assert "--kv-bytes" in warning.message
    assert str(2 * STEP) in warning.message


# -- who has to go --------------------------------------------------------------


def test_side_requests_do_not_evict_a_conversation():
    """Titles and tags come between the turns of a chat, and nobody asks for them again."""
    with with_room_for(4 * STEP) as engine:
        first = generate(engine, prompt_of(300))
        second = generate(engine, Prompt((*first.token_ids, 7, 8, 9)))
        assert second.cached == len(first.token_ids) - 1
        for salt in range(1, 9):
            assert generate(engine, prompt_of(200, salt), tokens=4).cached == 0
        third = generate(engine, Prompt((*second.token_ids, 7, 8, 9)))
        assert engine.status().bank_evictions > 0
    assert third.cached == len(second.token_ids) - 1


def test_what_was_evicted_is_said_to_have_been():
    with with_room_for(2 * STEP) as engine:
        first = generate(engine, prompt_of(300))
        generate(engine, prompt_of(300, 1))
        again = generate(engine, first.prompt)
    assert again.end.metrics.cache_miss_reason == "evicted"
    assert again.end.metrics.cache_lost_tokens > 250
    assert again.tokens == first.tokens


def test_a_pinned_prompt_stays():
    prompt = prompt_of(200)
    with with_room_for(4 * STEP) as engine:
        assert engine.pin(prompt) == 200
        for salt in range(1, 9):
            generate(engine, prompt_of(400, salt), tokens=4)
        assert engine.status().bank_evictions > 0
        turn = generate(engine, Prompt((*prompt.token_ids, 7, 8, 9)))
    assert turn.cached == 200


def test_a_prompt_that_is_too_large_cannot_be_pinned():
    with with_room_for(STEP) as engine:
        with pytest.raises(KVBudgetError):
            engine.pin(prompt_of(2 * STEP))
        assert generate(engine, prompt_of(100), tokens=4).end.reason == "length"
