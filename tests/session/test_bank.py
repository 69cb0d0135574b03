"""The bank against a plain list of token lists, with rows that are their own tokens."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.session import SessionBank
from mtplx.types import StateKey

DENSE = StateKey("dense", any_prefix=True)
HYBRID = StateKey("hybrid", any_prefix=False)
BYTES_PER_TOKEN = 10


@dataclass(frozen=True)
class TokenRows:
    """Rows that hold the tokens themselves, so that wrong rows show."""

    tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return BYTES_PER_TOKEN * len(self.tokens)

    def slice(self, start: int, end: int) -> TokenRows:
        assert 0 <= start < end <= len(self.tokens)
        return TokenRows(self.tokens[start:end])


@dataclass(frozen=True)
class PrefixSnapshot:
    """A snapshot that remembers the prefix it was taken after."""

    tokens: tuple[int, ...]
    nbytes: int = 7


def store(bank, tokens, key=DENSE, snapshots=()):
    tokens = tuple(tokens)
    return bank.store(
        key,
        tokens,
        lambda start, end: TokenRows(tokens[start:end]),
        {index: PrefixSnapshot(tokens[:index]) for index in snapshots},
    )


def restored(bank, tokens, key=DENSE):
    """Return the tokens whose state the bank restores, read from that state."""
    lease = bank.acquire(key, tokens)
    out = tuple(t for rows in lease.rows for t in rows.tokens)
    assert len(out) == lease.match.length == bank.match(key, tokens).length
    if lease.match.length and not key.any_prefix:
        assert lease.snapshot.tokens == out
    lease.release()
    return out


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


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("store"), prompts, st.sets(st.integers(1, 12), max_size=3)),
        st.tuples(st.just("lease"), prompts, st.just(())),
        st.tuples(st.just("release"), st.just(()), st.just(())),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(operations, st.booleans(), st.sampled_from([6, 15, 1000]))
def test_it_behaves_like_a_list_of_token_lists(steps, any_prefix, size):
    """Whatever is done, in any order: what comes back is a prefix of the prompt with the
    state of that prefix; without evictions it is the longest there is; and what a lease
    holds stays."""
    key = StateKey("k", any_prefix)
    bank = SessionBank(size)
    stored: list[tuple[tuple[int, ...], set[int]]] = []
    leases: list[tuple[object, tuple[int, ...]]] = []
    for kind, prompt, snapshots in steps:
        if kind == "store":
            kept = {index for index in snapshots if index <= len(prompt)}
            store(bank, prompt, key, kept)
            stored.append((tuple(prompt), kept))
        elif kind == "lease":
            lease = bank.acquire(key, prompt)
            leases.append((lease, tuple(prompt[: lease.match.length])))
            if bank.evictions == 0 and size == 1000:
                assert lease.match.length == _longest(stored, prompt, any_prefix)
        elif leases:
            leases.pop()[0].release()
        bank.check()
        for lease, held in leases:
            assert tuple(t for rows in lease.rows for t in rows.tokens) == held
            # One more token than held, of a value that occurs in no prompt.
            assert restored(bank, (*held, 9), key) == held
    for lease, _ in leases:
        lease.release()
    assert bank.pinned == 0
    bank.clear()
    assert bank.tokens == 0


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
