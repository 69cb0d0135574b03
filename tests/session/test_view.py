"""What is shown of the prefix tree: itself, or what most is to be seen of."""

from __future__ import annotations

from mtplx.session import SessionBank
from mtplx.session.view import FIRST_TOKENS, view
from tests.session.token_state import DENSE, HYBRID, PrefixSnapshot, TokenBuffer

SYSTEM = tuple(range(100, 140))


def keep(bank, tokens, key=DENSE, snapshots=()):
    bank.store(
        key,
        tokens,
        TokenBuffer(tokens).rows,
        {index: PrefixSnapshot(tuple(tokens[:index])) for index in snapshots},
    )


def runs(seen):
    return [(node.start, node.end, node.parent) for node in seen.nodes]


def test_an_empty_bank_shows_nothing():
    assert SessionBank().view().nodes == ()


def test_the_common_prefix_is_shown_once_and_the_latest_branch_first():
    bank = SessionBank()
    keep(bank, [*SYSTEM, 1, 2, 3])
    keep(bank, [*SYSTEM, 4, 5])
    bank.acquire(DENSE, [*SYSTEM, 4, 5, 6]).release()
    seen = bank.view()
    assert runs(seen) == [(0, 40, None), (40, 42, 0), (40, 43, 0)]
    top, latest, other = seen.nodes
    assert top.first_tokens == SYSTEM[:FIRST_TOKENS]
    assert (top.children, top.uses, latest.uses, other.uses) == (2, 1, 1, 0)
    assert latest.age == 0 < other.age
    assert top.nbytes == 400
    assert seen.left_out == 0


def test_snapshots_count_and_keys_stay_apart():
    bank = SessionBank()
    keep(bank, SYSTEM)
    keep(bank, SYSTEM, HYBRID, snapshots=(10, 40))
    dense, hybrid = bank.view().nodes
    assert (dense.fingerprint, dense.snapshots, dense.nbytes) == ("dense", (), 400)
    assert (hybrid.snapshots, hybrid.nbytes) == ((10, 40), 400 + 2 * 7)


def test_what_is_pinned_says_so():
    bank = SessionBank()
    keep(bank, SYSTEM)
    bank.pin(DENSE, SYSTEM)
    assert [node.pinned for node in bank.view().nodes] == [True]


def test_of_many_the_recent_and_the_long_ones_are_shown_with_what_leads_there():
    bank = SessionBank()
    keep(bank, [7] * 300)
    for branch in range(50):
        keep(bank, [*SYSTEM, 1000 + branch, 1])
    most = 6
    seen = view(bank._held.trees.roots(), bank.entries, most_nodes=most)
    assert len(seen.nodes) == most
    shown = {(node.start, node.first_tokens[0]) for node in seen.nodes}
    assert {(0, 7), (0, SYSTEM[0]), (40, 1049), (40, 1048)} <= shown
    assert all(node.parent is None or node.parent < i for i, node in enumerate(seen.nodes))
    assert len(seen.nodes) + seen.left_out == bank.entries == 52
