"""Ways in which prefix caches are known to fail elsewhere, each tried here by name.

Each test makes the situation, asserts that it was reached (that state was restored, that
a buffer was borrowed, that something was evicted), and compares what is then computed
with one pass. They run for every kind of cache for which the case exists.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.engine.disk import DiskWork
from mtplx.generation import PromptPrefill, restore_or_prefill_prompt_state
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import Finished, Prompt
from tests.engine.harness import Client, greedy_reference, request
from tests.text.tokenizers_factory import make_wrapper
from tests.tiny_models import (
    ANY_PREFIX,
    CONFIGS,
    VOCAB,
    WINDOW,
    make_network,
    one_pass_logits,
    prompt_ids,
    tiny_model,
)

TOLERANCE = 1e-4
TAIL_GRID = 8
LENGTH = 60
CUT = 40
PROMPT = prompt_ids(LENGTH)

KINDS = ("llama", "deepseek_v3", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2")
KINDS += ("falcon_h1",)
"""Rows for each token, latent rows, sliding windows without and with sinks, rows and
recurrent states, recurrent states alone, and both in one layer."""

every_kind = pytest.mark.parametrize("kind", KINDS)


def other_after(cut: int, salt: int = 1, prompt: list[int] = PROMPT) -> list[int]:
    """Return a prompt that parts from ``prompt`` at ``cut``, for good."""
    return prompt[:cut] + [(token + salt) % VOCAB for token in prompt[cut:]]


def begin(model, prompt, bank, *, edges=(CUT,), window=16, namespace="") -> PromptPrefill:
    return PromptPrefill(
        model,
        Prompt(tuple(prompt), tuple(edges)),
        bank,
        arrival_s=0.0,
        window=window,
        tail_grid=TAIL_GRID,
        namespace=namespace,
    )


def decode(model: Model, prefill: PromptPrefill, count: int) -> tuple[mx.array, list[int]]:
    logits = model.decode(prefill.cache, count)
    return logits, mx.argmax(logits, axis=-1).tolist()


def take_a_turn(model, prompt, bank, *, answer_tokens=6, **options) -> list[int]:
    """Read a prompt, answer, keep both, as a served request does; return the answer."""
    prefill = begin(model, prompt, bank, **options)
    prefill.run()
    answer = check_answer(model, prefill, answer_tokens)
    prefill.store([*prompt, *answer])
    prefill.release()
    bank.check()
    return answer


def check_answer(model, prefill: PromptPrefill, count: int = 6) -> list[int]:
    """Decode from a complete prompt, and compare with one pass over all of it."""
    prompt = [*prefill.prompt.token_ids]
    logits, answer = decode(model, prefill, count)
    check_rows(model, prompt, logits)
    return answer


def check_rows(model, prompt, logits: mx.array) -> None:
    """Compare greedy logits, the first of them after the prompt, with one pass."""
    whole = [*prompt, *mx.argmax(logits, axis=-1).tolist()]
    expected = one_pass_logits(model, whole)[len(prompt) - 1 : -1]
    assert logits.shape == expected.shape
    assert not mx.isnan(logits).any()
    assert float(mx.abs(logits - expected).max()) < TOLERANCE


def is_borrowed(prefill: PromptPrefill, bank: SessionBank) -> bool:
    """Say whether a request that just started writes to the bank's own buffer."""
    views = bank.read(prefill.key, prefill.prompt.token_ids, 0, prefill.cache.offset)
    assert views
    return all(view.buffer is prefill.cache.buffer for view in views)


# -- the whole prompt is known --------------------------------------------------


@every_kind
@pytest.mark.parametrize("known", ["the prompt", "more", "less by one", "with an answer"])
def test_a_whole_prompt_hit_is_not_off_by_one_token(kind, known):
    """The logits of the last token are needed, so it is read again, at its own place."""
    model, bank = tiny_model(kind), SessionBank()
    stored = {"the prompt": PROMPT[:CUT], "more": PROMPT, "less by one": PROMPT[: CUT - 1]}
    answer_tokens = 9 if known == "with an answer" else 1
    edges = (CUT - 1, CUT)
    earlier = stored.get(known, PROMPT[:CUT])
    take_a_turn(model, earlier, bank, answer_tokens=answer_tokens, edges=edges)
    prefill = begin(model, PROMPT[:CUT], bank)
    assert prefill.clock.cached_tokens == CUT - 1
    prefill.run()
    assert prefill.cache.offset == CUT
    assert [*prefill.clock.span_tokens] == [1]
    check_answer(model, prefill)
    prefill.release()
    bank.check()


@every_kind
def test_a_prompt_of_one_token_that_is_known(kind):
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT[:1], bank)
    prefill = begin(model, PROMPT[:1], bank)
    assert prefill.clock.cached_tokens == 0
    prefill.run()
    check_answer(model, prefill)
    prefill.release()


# -- arrays that two requests share ---------------------------------------------


@every_kind
def test_two_requests_from_one_prefix_take_turns_and_do_not_touch_each_other(kind):
    """The first writes to the bank's buffer, the second to a copy."""
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT, bank)
    prompts = [other_after(CUT, salt) for salt in (1, 2)]
    prefills = [begin(model, prompt, bank) for prompt in prompts]
    assert [p.clock.cached_tokens for p in prefills] == [CUT, CUT]
    assert [is_borrowed(p, bank) for p in prefills] == [True, False]
    for end in (CUT + 5, CUT + 11, LENGTH):
        for prefill in prefills:
            prefill.run(end)
            prefill.keep_progress()
            bank.check()
    rows: list[list[mx.array]] = [[], []]
    for _ in range(WINDOW + 2):
        for mine, prefill in zip(rows, prefills, strict=True):
            mine.append(model.decode(prefill.cache)[0])
    for prompt, mine, prefill in zip(prompts, rows, prefills, strict=True):
        check_rows(model, prompt, mx.stack(mine))
        prefill.release()
    bank.check()
    # And the prompt both began with is what it was.
    for prompt in (PROMPT, *prompts):
        again = begin(model, prompt, bank)
        assert again.clock.cached_tokens >= CUT
        again.run()
        check_answer(model, again)
        again.release()


@every_kind
@pytest.mark.parametrize(
    "stops", ["before its first span", "in its prompt", "in its answer"]
)
def test_a_borrower_that_is_cancelled_half_way_leaves_the_prefix_as_it_was(kind, stops):
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT, bank)
    borrower = begin(model, other_after(CUT), bank)
    assert borrower.clock.cached_tokens == CUT
    assert is_borrowed(borrower, bank)
    if stops == "in its prompt":
        borrower.run(CUT + 9)
    elif stops == "in its answer":
        borrower.run()
        decode(model, borrower, 5)
    borrower.release()
    bank.check()
    assert bank.pinned == 0
    for prompt in (PROMPT, other_after(CUT, 2), other_after(CUT)):
        after = begin(model, prompt, bank)
        assert after.clock.cached_tokens >= CUT
        after.run()
        check_answer(model, after)
        after.release()


@every_kind
def test_a_caller_may_decode_on_from_a_restored_state(kind):
    """What it writes, as far as it likes, never reaches the bank."""
    model, bank = tiny_model(kind), SessionBank()
    known = {"session_bank": bank, "model": model, "edges": (CUT,)}
    restore_or_prefill_prompt_state(token_ids=PROMPT, **known)
    state = restore_or_prefill_prompt_state(token_ids=other_after(CUT), **known)
    assert state.cached_tokens == CUT
    # Beyond every window, and beyond the rows a buffer was made for.
    logits = model.decode(state.cache, 300)
    check_rows(model, other_after(CUT), logits[:20])
    for prompt in (PROMPT, other_after(CUT), other_after(CUT, 2)):
        again = restore_or_prefill_prompt_state(token_ids=prompt, **known)
        assert again.cached_tokens >= CUT
        check_rows(model, prompt, model.decode(again.cache, 4))
    bank.check()


# -- state of the wrong index ---------------------------------------------------


@every_kind
@pytest.mark.parametrize("cut", [1, WINDOW - 1, WINDOW, WINDOW + 1, CUT])
def test_recurrent_state_is_that_of_the_restore_point_and_not_of_the_stored_end(kind, cut):
    """What is stored goes on for a whole answer after the point to resume at."""
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT, bank, edges=(cut,), answer_tokens=WINDOW)
    prefill = begin(model, other_after(cut), bank)
    assert prefill.clock.cached_tokens == cut
    assert prefill.cache.offset == cut
    prefill.run()
    check_answer(model, prefill)
    prefill.release()


@every_kind
def test_a_tool_loop_resumes_after_each_call(kind):
    """Answer, result, answer, result: each round computes its result and the last token
    of the call before it, which was chosen and never read."""
    model, bank = tiny_model(kind), SessionBank()
    conversation = PROMPT[:20]
    take_a_turn(model, conversation, bank, edges=())
    for round_ in range(3):
        prefill = begin(model, conversation, bank, edges=())
        prefill.run()
        call = check_answer(model, prefill, 7)
        prefill.store([*conversation, *call])
        prefill.release()
        known = len(conversation) + len(call) - 1
        conversation = [*conversation, *call, *prompt_ids(9, seed=50 + round_)]
        after = begin(model, conversation, bank, edges=())
        assert after.clock.cached_tokens == known
        after.run()
        assert sum(after.clock.span_tokens) == len(conversation) - known
        check_answer(model, after)
        after.release()
        bank.check()


@every_kind
def test_a_tool_call_that_comes_back_otherwise_resumes_before_it(kind):
    """The client wrote the call's arguments anew, so the answer differs in its middle."""
    model, bank = tiny_model(kind), SessionBank()
    answer = take_a_turn(model, PROMPT, bank, edges=(LENGTH - 3,), answer_tokens=10)
    rewritten = [*answer[:4], *((token + 1) % VOCAB for token in answer[4:])]
    turn = [*PROMPT, *rewritten, *prompt_ids(9, seed=60)]
    prefill = begin(model, turn, bank, edges=(LENGTH,))
    # Where state can be cut, at the divergence; else where the answer began.
    assert prefill.clock.cached_tokens == LENGTH + (4 if kind in ANY_PREFIX else 0)
    prefill.run()
    check_answer(model, prefill)
    prefill.release()


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(
    ("cut", "way"),
    [
        # What follows a short prefix would have to move, so the prefix is copied.
        (WINDOW, "copied"),
        (WINDOW + 1, "copied"),
        (2 * WINDOW, "borrowed"),
        (2 * WINDOW + 5, "borrowed"),
    ],
)
def test_a_sliding_window_is_restored_after_it_wrapped(kind, cut, way):
    """Its ring was overwritten by what came after the restore point, and wraps again."""
    assert cut + WINDOW < LENGTH
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT, bank, edges=(cut,), answer_tokens=3)
    prefill = begin(model, other_after(cut), bank)
    assert prefill.clock.cached_tokens == cut
    assert is_borrowed(prefill, bank) == (way == "borrowed")
    prefill.run()
    check_answer(model, prefill, 2 * WINDOW + 3)
    prefill.release()
    bank.check()


# -- a retry --------------------------------------------------------------------


@every_kind
def test_a_retry_after_a_cancel_resumes_and_is_what_a_cold_one_is(kind):
    model, bank = tiny_model(kind), SessionBank()
    cancelled = begin(model, PROMPT, bank)
    for end in (16, 32, CUT, CUT + 3):
        cancelled.run(end)
        cancelled.keep_progress()
    cancelled.release()
    bank.check()
    retry = begin(model, PROMPT, bank)
    assert retry.clock.cached_tokens == (CUT + 3 if kind in ANY_PREFIX else CUT)
    retry.run()
    check_answer(model, retry, WINDOW + 2)
    retry.release()


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_next"])
def test_a_retry_in_the_engine_resumes_beside_a_stream(kind):
    """Cancelled by its client between two spans; the retry comes while others decode."""
    wrapper = make_wrapper()
    config = {**CONFIGS[kind], "vocab_size": len(wrapper)}
    model = Model(make_network(config), config, wrapper)
    bank = SessionBank()
    settings = Settings(prefill_window=16, tail_grid=TAIL_GRID, max_num_batched_tokens=48)
    core = EngineCore(model, Tokenizer(wrapper), bank, settings)
    prompt = [(11 * i * i + i) % 250 + 5 for i in range(140)]
    stream = Client()
    core.add(request(prompt[:9], request_id="stream", tokens=200), stream)
    while stream.events.empty() or not core.scheduler.running:
        core.iterate()
    core.add(with_edges(request(prompt, request_id="gives up")), Client())
    while not bank.match(model.state_key, prompt).length:
        core.iterate()
    core.cancel("gives up")
    known = bank.match(model.state_key, prompt).length
    assert 0 < known < len(prompt) - 1
    client = Client()
    core.add(with_edges(request(prompt, request_id="retry")), client)
    while core.scheduler.running + core.scheduler.waiting > 1:
        core.iterate()
    core.cancel("stream")
    end = client.end()
    assert isinstance(end, Finished)
    assert end.metrics.cached_tokens == known
    assert client.tokens == greedy_reference(prompt, 12, model)
    assert bank.pinned == 0
    bank.check()


def with_edges(asked):
    prompt = Prompt(asked.prompt.token_ids, edges=(20, 45))
    return type(asked)(**{**vars(asked), "prompt": prompt})


# -- memory that moves under what is kept ---------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mamba2"])
def test_a_buffer_grows_while_the_bank_holds_views_of_it(kind):
    """A buffer has room for 256 rows at first, and is another array after that."""
    model, bank = tiny_model(kind), SessionBank()
    prompt = prompt_ids(250, seed=8)
    edges = (180, 240)
    growing = begin(model, prompt, bank, edges=edges, window=64)
    growing.run()
    growing.store(prompt)
    before = growing.cache.buffer.nbytes
    rows = [*decode(model, growing, 20)[0]]
    assert growing.cache.buffer.nbytes > before
    # It still runs, so others copy from its buffer, old rows and new.
    for cut in edges:
        beside = begin(model, other_after(cut, 1, prompt), bank, edges=edges)
        assert beside.clock.cached_tokens == cut
        assert not is_borrowed(beside, bank)
        beside.run()
        check_answer(model, beside)
        beside.release()
    rows += [*decode(model, growing, 4)[0]]
    check_rows(model, prompt, mx.stack(rows))
    answer = mx.argmax(mx.stack(rows), axis=-1).tolist()
    growing.store([*prompt, *answer])
    growing.release()
    bank.check()
    turn = [*prompt, *answer, *prompt_ids(7, seed=9)]
    after = begin(model, turn, bank)
    assert after.clock.cached_tokens == len(prompt) + len(answer) - 1
    after.run()
    check_answer(model, after)
    after.release()


@every_kind
@pytest.mark.parametrize("cut", [20, CUT])
def test_a_part_of_a_buffer_is_evicted_while_another_part_is_in_use(kind, cut):
    """A prefix shorter than what follows it is copied, a longer one borrowed: either way
    what follows is evicted while a request runs from the prefix."""
    model, bank = tiny_model(kind), SessionBank(2 * LENGTH + 10)
    for prompt in (PROMPT, other_after(cut, 2)):
        take_a_turn(model, prompt, bank, edges=(cut,), answer_tokens=1)
    running = begin(model, other_after(cut), bank, edges=(cut,))
    assert running.clock.cached_tokens == cut
    assert is_borrowed(running, bank) == (cut == CUT)
    running.run(cut + 3)
    for seed in (20, 20, 21, 21):  # Twice, or they would make way for one another.
        take_a_turn(model, prompt_ids(LENGTH, seed=seed), bank, answer_tokens=1)
    assert bank.evictions > 0
    for prompt in (PROMPT, other_after(cut, 2)):  # What followed is gone, the prefix not.
        assert bank.match(running.key, prompt).shared_tokens == cut
    running.run()
    check_answer(model, running)
    running.release()
    bank.check()
    for prompt in (PROMPT, other_after(cut, 3)):
        after = begin(model, prompt, bank, edges=(cut,))
        assert after.clock.cached_tokens == cut
        after.run()
        check_answer(model, after)
        after.release()
        bank.check()


# -- whose it is ----------------------------------------------------------------


@every_kind
def test_the_same_prompt_in_two_namespaces_is_two_prompts(kind):
    model, bank = tiny_model(kind), SessionBank()
    take_a_turn(model, PROMPT, bank, namespace="a")
    held = bank.tokens
    theirs = begin(model, PROMPT, bank, namespace="b")
    assert theirs.clock.cached_tokens == 0
    # Not even the reason tells that somebody has it.
    assert theirs.clock.miss_reason == "never_seen"
    theirs.run()
    answer = check_answer(model, theirs)
    theirs.store([*PROMPT, *answer])
    theirs.release()
    assert bank.tokens == 2 * held
    mine, theirs = (begin(model, other_after(CUT), bank, namespace=n) for n in "ab")
    for prefill in (mine, theirs):
        assert prefill.clock.cached_tokens == CUT
        assert is_borrowed(prefill, bank)
    for end in (CUT + 5, LENGTH):
        for prefill in (mine, theirs):
            prefill.run(end)
    for prefill in (mine, theirs):
        check_answer(model, prefill)
        prefill.release()
    bank.check()


# -- disk -----------------------------------------------------------------------


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, max_bytes=1 << 30, daily_write_bytes=1 << 30)


def disk_work(model, bank, tier, came=None) -> DiskWork:
    """Reading from the disk counts as faster than computing."""
    wake = (came or threading.Event()).set
    return DiskWork(model, bank, tier, wake, lambda start, end: math.inf)


def write(model, bank, prompt, folder) -> None:
    tier = open_tier(folder)
    work = disk_work(model, bank, tier)
    work.keep(model.state_key, prompt)
    while not work.idle:
        work.step()
    tier.close()
    assert not tier.stats().dropped


def read(model, bank, prompt, folder) -> int:
    """Bring what the disk has of a prompt into the bank; return the tokens it had."""
    tier, came = open_tier(folder), threading.Event()
    work = disk_work(model, bank, tier, came)
    tokens = np.asarray(prompt, np.int32)
    in_memory = bank.match(model.state_key, tokens).length
    assert work.fetch("request", model.state_key, tokens, in_memory)
    assert came.wait(60)
    while not work.idle:
        work.step()
    tier.check()
    restored = tier.stats().restored_tokens
    tier.close()
    return restored


@every_kind
@pytest.mark.parametrize("cut", [70, 95])
def test_a_prefix_from_disk_that_parts_inside_a_stored_segment(kind, cut, tmp_path):
    """The segment is read whole; what lies behind the parting is another prompt's."""
    model, bank = tiny_model(kind), SessionBank()
    prompt = prompt_ids(110, seed=4)
    take_a_turn(model, prompt, bank, edges=(cut,), answer_tokens=1)
    write(model, bank, prompt, tmp_path)
    restarted = SessionBank()
    parting = other_after(cut, 1, prompt)
    assert read(model, restarted, parting, tmp_path) == cut
    restarted.check()
    assert restarted.match(model.state_key, prompt).shared_tokens == cut
    for asked in (parting, prompt, other_after(cut, 2, prompt)):
        prefill = begin(model, asked, restarted, edges=(cut,))
        assert prefill.clock.cached_tokens == cut
        prefill.run()
        check_answer(model, prefill)
        prefill.release()
        restarted.check()


@every_kind
def test_a_branch_written_later_is_restored_from_two_segments(kind, tmp_path):
    """The second conversation's rows follow, on disk, those of the first."""
    model, bank = tiny_model(kind), SessionBank()
    prompt = prompt_ids(110, seed=4)
    parting = other_after(70, 1, prompt)
    for asked in (prompt, parting):
        take_a_turn(model, asked, bank, edges=(70,), answer_tokens=1)
        write(model, bank, asked, tmp_path)
    restarted = SessionBank()
    turn = [*parting, *prompt_ids(9, seed=5)]
    assert read(model, restarted, turn, tmp_path) == len(parting)
    prefill = begin(model, turn, restarted, edges=())
    assert prefill.clock.cached_tokens == len(parting)
    prefill.run()
    check_answer(model, prefill)
    prefill.release()
    restarted.check()
