"""The bank against a plain list of token lists, with rows that are their own tokens."""

from __future__ import annotations

import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.errors import KVBudgetError
from mtplx.metrics import Divergence
from mtplx.session import SessionBank
from mtplx.types import StateKey
from tests.session.token_state import (
    BYTES_PER_TOKEN,
    DENSE,
    HYBRID,
    Request,
)


def store(bank, tokens, key=DENSE, snapshots=()):
    """Let a request compute and keep ``tokens``; return what is newly held."""
    request = Request(bank, tokens, key)
    request.compute()
    added = request.store(snapshots)
    request.end()
    return added


def restored(bank, tokens, key=DENSE):
    """Return the tokens whose state the bank restores, read from that state."""
    match = bank.match(key, tokens)
    request = Request(bank, tokens, key)
    assert request.length == match.length
    request.end()
    return request.restored


def test_a_longer_prompt_restores_all_that_was_stored():
    bank = SessionBank()
    assert store(bank, range(10)) == 10
    assert restored(bank, range(20)) == tuple(range(10))


def test_the_whole_prompt_is_never_restored():
    """The last token's logits are needed, so it is computed: a whole-prompt hit that is
    off by one gives other answers at temperature 0."""
    bank = SessionBank()
    store(bank, range(10))
    assert restored(bank, range(10)) == tuple(range(9))
    assert restored(bank, [0]) == ()


def test_a_diverging_prompt_restores_up_to_the_divergence():
    bank = SessionBank()
    store(bank, [1, 2, 3, 4, 5])
    assert restored(bank, [1, 2, 3, 9, 9]) == (1, 2, 3)


def test_common_prefixes_are_held_once():
    bank = SessionBank()
    store(bank, [*range(100), 200])
    assert store(bank, [*range(100), 201, 202]) == 2
    assert bank.tokens == 103
    assert restored(bank, [*range(100), 200, 0]) == (*range(100), 200)
    assert restored(bank, [*range(100), 201, 202, 0]) == (*range(100), 201, 202)
    bank.check()


def test_state_that_cannot_be_cut_resumes_at_snapshots_only():
    bank = SessionBank()
    store(bank, range(10), HYBRID, snapshots=(4, 8))
    assert restored(bank, range(20), HYBRID) == tuple(range(8))
    assert restored(bank, [*range(7), 99], HYBRID) == tuple(range(4))
    assert bank.match(HYBRID, [0, 1, 99]).miss_reason == "no_snapshot"


def test_rows_behind_the_last_snapshot_are_not_kept():
    bank = SessionBank()
    assert store(bank, range(10), HYBRID, snapshots=(6,)) == 6
    assert store(bank, [50, 51], HYBRID) == 0
    bank.check()


def test_snapshots_stay_with_their_index_when_a_run_is_split():
    bank = SessionBank()
    store(bank, range(10), HYBRID, snapshots=(2, 5, 6, 10))
    store(bank, [*range(5), 70, 71], HYBRID, snapshots=(7,))
    assert restored(bank, [*range(5), 80], HYBRID) == tuple(range(5))
    assert restored(bank, [*range(9), 80], HYBRID) == tuple(range(6))
    bank.check()


def test_miss_reasons():
    bank = SessionBank()
    assert bank.match(DENSE, [1, 2]).miss_reason == "never_seen"
    store(bank, [1, 2, 3])
    assert bank.match(DENSE, [9, 9]).miss_reason == "never_seen"
    assert bank.match(HYBRID, [1, 2]).miss_reason == "other_model"
    assert bank.match(DENSE, [1, 2, 3, 4]).miss_reason is None
    assert SessionBank(0).match(DENSE, [1, 2]).miss_reason == "disabled"


def test_models_do_not_share_state():
    bank = SessionBank()
    store(bank, [1, 2, 3])
    other = StateKey("dense-too", any_prefix=True)
    assert restored(bank, [1, 2, 3, 4], other) == ()


def test_the_least_recently_used_goes_first():
    bank = SessionBank(30)
    store(bank, [1] * 10)
    store(bank, [2] * 10)
    store(bank, [3] * 10)
    restored(bank, [1] * 11)
    store(bank, [4] * 10)
    assert restored(bank, [1] * 11) != ()
    assert restored(bank, [2] * 11) == ()
    assert bank.evictions == 1
    bank.check()


def test_a_pinned_path_is_never_evicted():
    bank = SessionBank(20)
    store(bank, [1] * 10)
    store(bank, [*[1] * 10, 2, 3])
    lease = bank.acquire(DENSE, [*[1] * 10, 2, 3, 4])
    assert lease.match.length == 12
    store(bank, range(50, 70))
    assert restored(bank, [*[1] * 10, 2, 3, 4]) == (*[1] * 10, 2, 3)
    assert bank.pinned == 1
    lease.release()
    lease.release()
    assert bank.pinned == 0
    store(bank, range(50, 70))
    assert restored(bank, [1] * 5) == ()
    bank.check()


def test_a_lease_survives_a_split_of_its_run():
    bank = SessionBank(14)
    store(bank, range(10))
    lease = bank.acquire(DENSE, range(11))
    store(bank, [0, 1, 2, 77])
    store(bank, range(100, 114))
    assert restored(bank, range(11)) == tuple(range(10))
    lease.release()
    bank.check()


def test_what_is_too_large_is_kept_in_part_and_said_once(caplog):
    bank = SessionBank(8)
    with caplog.at_level(logging.WARNING):
        assert store(bank, range(20)) == 8
        assert store(bank, range(40, 60)) == 8
    assert len(caplog.records) == 1
    assert "max_kv_size 8" in caplog.text
    assert bank.too_large == 2
    bank.check()


def test_bytes_are_a_budget_too():
    bank = SessionBank(max_bytes=25 * BYTES_PER_TOKEN)
    store(bank, [1] * 10)
    store(bank, [2] * 10)
    store(bank, [3] * 10)
    assert bank.nbytes <= bank.max_bytes
    assert restored(bank, [1] * 11) == ()
    assert restored(bank, [3] * 11) == (3,) * 10
    bank.check()


def test_clear_forgets_all_that_is_not_pinned():
    bank = SessionBank()
    store(bank, [1, 2, 3])
    store(bank, [1, 2, 4, 5])
    bank.clear()
    assert (bank.tokens, bank.nbytes, bank.entries) == (0, 0, 0)
    bank.check()


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="negative"):
        SessionBank(-1)


# -- running requests ------------------------------------------------------------


def test_a_request_goes_on_in_the_buffer_that_holds_its_prefix():
    bank = SessionBank()
    store(bank, range(10))
    request = Request(bank, range(14))
    assert request.lease.borrowed is not None
    request.compute()
    assert request.store() == 4
    assert bank.nbytes == 14 * BYTES_PER_TOKEN
    request.end()
    assert bank.nbytes == 14 * BYTES_PER_TOKEN
    bank.check()


def test_two_requests_never_write_to_one_buffer():
    bank = SessionBank()
    store(bank, range(10))
    first = Request(bank, [*range(10), 20, 21])
    second = Request(bank, [*range(10), 30, 31])
    assert first.lease.borrowed is not None
    assert second.lease.borrowed is None
    for request in (first, second):
        request.compute()
        request.store()
    assert first.buffer.tokens == [*range(10), 20, 21]
    first.end()
    second.end()
    assert restored(bank, [*range(10), 20, 21, 0]) == (*range(10), 20, 21)
    assert restored(bank, [*range(10), 30, 31, 0]) == (*range(10), 30, 31)
    bank.check()


def test_what_lies_behind_a_borrowed_prefix_is_moved_out_of_the_way():
    bank = SessionBank()
    store(bank, range(10))
    retry = Request(bank, [*range(7), 99, 98])
    assert retry.lease.borrowed is not None
    retry.compute()
    retry.store()
    retry.end()
    assert restored(bank, [*range(10), 0]) == tuple(range(10))
    assert restored(bank, [*range(7), 99, 98, 0]) == (*range(7), 99, 98)
    bank.check()


def test_a_caller_may_keep_the_buffer_and_do_with_it_what_it_likes():
    bank = SessionBank()
    request = Request(bank, range(10))
    request.compute()
    request.store()
    request.end(keep_buffer=True)
    request.buffer.tokens[:] = [7] * 10
    assert restored(bank, range(11)) == tuple(range(10))
    bank.check()


def test_nothing_is_kept_of_a_broken_buffer():
    bank = SessionBank()
    request = Request(bank, range(10))
    request.compute()
    request.store()
    request.end(intact=False)
    assert restored(bank, range(11)) == ()
    assert (bank.tokens, bank.nbytes, bank.pinned) == (0, 0, 0)
    bank.check()


def test_a_copy_of_a_long_prefix_is_not_held_when_its_request_is_over():
    wide = 1 << 20  # Each token weighs more than what is too little to bother.
    bank = SessionBank()
    store(bank, range(8))
    first = Request(bank, [*range(8), 20])
    second = Request(bank, [*range(8), 30])
    for request in (first, second):
        request.buffer.bytes_per_token = wide
        request.compute()
        request.store()
    assert bank.nbytes == 18 * wide
    first.end()
    second.end()
    assert bank.nbytes == 10 * wide
    assert restored(bank, [*range(8), 30, 0]) == (*range(8), 30)
    bank.check()


# -- budget ----------------------------------------------------------------------


def test_room_is_made_for_a_request_before_it_starts():
    bank = SessionBank(max_bytes=120 * BYTES_PER_TOKEN)
    store(bank, [1] * 40)
    store(bank, [2] * 40)
    lease = bank.acquire(DENSE, [2] * 48, reserve_bytes=100 * BYTES_PER_TOKEN)
    assert lease.match.length == 40
    assert bank.match(DENSE, [1] * 41).miss_reason == "evicted"
    lease.run_in(lease.borrowed, 100 * BYTES_PER_TOKEN)
    assert bank.nbytes == bank.running_nbytes == 100 * BYTES_PER_TOKEN
    with pytest.raises(KVBudgetError, match="running requests hold 1000"):
        bank.acquire(DENSE, [3] * 4, reserve_bytes=21 * BYTES_PER_TOKEN)
    assert lease.reserve(120 * BYTES_PER_TOKEN)
    assert not lease.reserve(121 * BYTES_PER_TOKEN)
    lease.release()
    bank.check()


def test_a_conversation_survives_any_number_of_side_requests():
    bank = SessionBank(60)
    conversation = list(range(100, 120))
    store(bank, conversation)
    store(bank, [*conversation, *range(200, 210)])
    for title in range(50):
        store(bank, [1000 + title] * 9)
    assert restored(bank, [*conversation, *range(200, 210), 0]) != ()
    assert bank.evictions > 40
    bank.check()


def test_old_favourites_do_not_keep_a_new_conversation_out():
    bank = SessionBank(60)
    for first in (1, 2, 3):
        store(bank, [first] * 20)
        restored(bank, [first] * 21)
    store(bank, [7] * 10)
    store(bank, [8] * 10)
    assert restored(bank, [7] * 11) == (7,) * 10
    assert restored(bank, [8] * 11) == (8,) * 10
    bank.check()


def test_a_pinned_prompt_is_never_evicted():
    bank = SessionBank(20)
    store(bank, [1] * 10)
    assert bank.pin(DENSE, [1] * 8) == 8
    for first in range(2, 9):
        store(bank, [first] * 12)
    assert restored(bank, [1] * 11) == (1,) * 8
    assert bank.pinned == 0
    bank.clear()
    assert bank.tokens == 8
    bank.check()


def test_snapshots_that_save_little_go_before_any_conversation():
    bank = SessionBank(max_bytes=105 * BYTES_PER_TOKEN)
    store(bank, range(100), HYBRID, snapshots=(10, 50, 52, 100))
    assert bank.nbytes == 1000 + 28
    store(bank, [900, 901], HYBRID, snapshots=(2,))
    assert bank.evictions == 0
    assert bank.thinned == 1
    assert bank.match(HYBRID, [*range(53), 7]).length == 50
    assert bank.match(HYBRID, [*range(100), 7]).length == 100
    bank.check()


# -- why no more -----------------------------------------------------------------


def test_a_divergence_names_the_token_on_both_sides():
    bank = SessionBank()
    store(bank, range(10))
    match = bank.match(DENSE, [0, 1, 2, 77, 78, 79])
    assert match.miss_reason == "diverged"
    assert match.divergence == Divergence(3, kept_token=3, sent_token=77)
    assert (match.length, match.lost_tokens) == (3, 2)


def test_a_prompt_that_only_goes_on_misses_nothing():
    bank = SessionBank()
    store(bank, range(10))
    match = bank.match(DENSE, range(20))
    assert (match.length, match.miss_reason, match.divergence) == (10, None, None)


@pytest.mark.parametrize("known", [6, 10], ids=["part of a run", "all of it"])
def test_a_prompt_that_is_known_to_its_end_misses_nothing(known):
    """Its last token is computed all the same, for its logits."""
    bank = SessionBank()
    store(bank, range(10))
    match = bank.match(DENSE, range(known))
    assert (match.length, match.miss_reason, match.divergence) == (known - 1, None, None)


def test_what_had_to_go_is_remembered():
    bank = SessionBank(64)
    store(bank, range(64))
    store(bank, range(100, 164))
    match = bank.match(DENSE, range(70))
    assert (match.length, match.miss_reason, match.lost_tokens) == (0, "evicted", 64)


def test_what_was_too_large_is_remembered():
    bank = SessionBank(40)
    store(bank, range(80))
    match = bank.match(DENSE, range(90))
    assert (match.length, match.miss_reason, match.lost_tokens) == (40, "too_large", 24)


def test_no_snapshot_says_what_it_costs():
    bank = SessionBank()
    store(bank, range(10), HYBRID, snapshots=(4, 10))
    match = bank.match(HYBRID, [*range(8), 50, 51])
    assert (match.length, match.miss_reason, match.lost_tokens) == (4, "no_snapshot", 4)
    assert match.divergence.index == 8


def test_reasons_are_counted_once_a_request():
    bank = SessionBank()
    store(bank, [1, 2, 3])
    restored(bank, [1, 2, 3, 4])
    restored(bank, [9, 9])
    assert bank.misses == {"never_seen": 2}


def test_namespaces_see_nothing_of_each_other():
    bank = SessionBank()
    mine, yours = (StateKey("m", any_prefix=True, namespace=n) for n in ("a", "b"))
    store(bank, range(10), mine)
    assert restored(bank, range(10), yours) == ()
    assert bank.match(yours, range(10)).miss_reason == "never_seen"


# -- against a plain list ---------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
indices = st.sets(st.integers(1, 12), max_size=3)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("start"), prompts, st.just(())),
        st.tuples(st.just("go on"), st.integers(0, 9), indices),
        st.tuples(
            st.just("end"),
            st.integers(0, 9),
            st.sampled_from(["ok"] * 4 + ["keep", "broken"]),
        ),
        st.tuples(st.just("pin"), prompts, st.just(())),
    ),
    max_size=60,
)


def behave(steps, any_prefix, size, max_bytes=None):
    """Whatever is done, in any order: a request gets a prefix of its prompt with the state
    of that prefix; without evictions it is the longest there is; nobody's state is
    touched by another's, and every view in the tree shows the tokens it stands for."""
    key = StateKey("k", any_prefix)
    bank = SessionBank(size, max_bytes=max_bytes)
    stored: list[tuple[tuple[int, ...], set[int]]] = []
    running: list[Request] = []
    pinned = False
    whole = size > 10_000 and max_bytes is None
    for kind, what, more in steps:
        if kind == "start":
            try:
                request = Request(bank, what, key)
            except KVBudgetError:
                assert running or pinned or BYTES_PER_TOKEN * len(what) > max_bytes
                continue
            assert request.restored == tuple(what[: request.length])
            if whole:
                assert request.length == _longest(stored, what, any_prefix)
            running.append(request)
        elif kind == "pin":
            pinned = bool(bank.pin(key, what)) or pinned
        elif running:
            request = running[what % len(running)]
            if kind == "go on":
                request.compute()
                kept = {index for index in more if index <= len(request.prompt)}
                request.store(kept)
                stored.append((request.prompt, kept))
            else:
                running.remove(request)
                ways = {
                    "ok": {},
                    "keep": {"keep_buffer": True},
                    "broken": {"intact": False},
                }
                request.end(**ways[more])
                whole = whole and more != "broken"
        bank.check()
        for request in running:
            tokens = tuple(request.buffer.tokens[: request.computed])
            assert tokens == request.prompt[: request.computed]
        for node in bank._nodes():
            assert node.view.tokens == tuple(node.tokens)
            for index, kept in node.snapshots.items():
                assert kept.snapshot.tokens == tuple(node.prefix())[:index]
    for request in running:
        request.end()
    assert bank.pinned == 0
    assert bank.running_nbytes == 0
    bank.check()
    return bank


@settings(max_examples=400, deadline=None)
@given(
    operations,
    st.booleans(),
    st.sampled_from([6, 15, 100_000]),
    st.sampled_from([None, 80, 300]),
)
def test_it_behaves_like_a_list_of_token_lists(steps, any_prefix, size, max_bytes):
    behave(steps, any_prefix, size, max_bytes)


@pytest.mark.parametrize("any_prefix", [True, False])
@pytest.mark.parametrize(
    ("size", "max_bytes"), [(100_000, None), (60, None), (100_000, 900)]
)
def test_it_does_so_for_thousands_of_steps(any_prefix, size, max_bytes):
    rng = random.Random(size)
    steps = []
    for _ in range(3000):
        draw = rng.random()
        if draw < 0.4:
            prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
            steps.append(("start", prompt, ()))
        elif draw < 0.7:
            steps.append(("go on", rng.randrange(10), {rng.randrange(1, 40) for _ in "ab"}))
        elif draw < 0.705:
            steps.append(("pin", [rng.randrange(3)], ()))
        else:
            way = rng.choice(["ok"] * 30 + ["keep", "broken"])
            steps.append(("end", rng.randrange(10), way))
    bank = behave(steps, any_prefix, size, max_bytes)
    assert (bank.evictions > 100) == (size == 60 or max_bytes is not None)


def _longest(stored, prompt, any_prefix):
    best = 0
    for tokens, snapshots in stored:
        shared = 0
        while shared < min(len(tokens), len(prompt)) and tokens[shared] == prompt[shared]:
            shared += 1
        shared = min(shared, len(prompt) - 1)
        if not any_prefix:
            shared = max((index for index in snapshots if index <= shared), default=0)
        best = max(best, shared)
    return best
