"""The order in which things go, against a search through all that is held."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.errors import KVBudgetError
from mtplx.session import SessionBank, eviction
from mtplx.session.eviction import ONE_OFF_SHARE, Order
from mtplx.types import StateKey
from tests.session.token_state import (
    BYTES_PER_TOKEN,
    DENSE,
    HYBRID,
    Request,
    TokenBuffer,
)

KEYS = (DENSE, HYBRID, StateKey("hybrid", any_prefix=False, namespace="other"))


def least_worth(bank):
    """The leaf to evict, found by looking at every node."""
    nodes = [*bank._nodes()]
    running = bank._held.ledger.is_running
    idle = [node for node in nodes if not node.pins and not running(node.view.buffer)]
    leaves = [node for node in idle if not node.children]
    one_off = [node for node in leaves if node.uses == 0]
    one_off_tokens = sum(len(node.tokens) for node in idle if node.uses == 0)
    if one_off and one_off_tokens > ONE_OFF_SHARE * sum(len(n.tokens) for n in nodes):
        leaves = one_off
    return min(leaves, key=lambda node: node.last_used, default=None)


def least_saving(bank):
    """The snapshot to thin out, found by walking down every tree."""
    found = []
    stack = [(node, 0) for node in bank._nodes() if node.parent.parent is None]
    while stack:
        node, previous = stack.pop()
        for index, kept in sorted(node.snapshots.items()):
            gap, previous = index - previous, index
            needed = index == node.end and len(node.children) != 1
            if not (needed or node.pins or kept.uses or gap > eviction.THIN_TOKENS):
                found.append((gap / kept.snapshot.nbytes, kept.number, kept))
        stack.extend((child, previous) for child in node.children.values())
    return min(found)[-1] if found else None


class WatchedBank(SessionBank):
    """Compares each choice, whenever one is made, with a search through everything.

    Attributes:
        chosen: How many choices were compared.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.chosen = 0
        self._held.order.least_worth = self._least_worth
        self._held.order.least_saving = self._least_saving

    def compare(self):
        self._least_worth(self.tokens)
        self._least_saving()

    def _least_worth(self, tokens):
        assert tokens == sum(len(node.tokens) for node in self._nodes())
        return self._same(Order.least_worth(self._held.order, tokens), least_worth(self))

    def _least_saving(self):
        wanted = least_saving(self)
        return self._same(Order.least_saving(self._held.order), wanted)

    def _same(self, chosen, wanted):
        assert chosen is wanted
        self.chosen += chosen is not None
        return chosen


tokens = st.lists(st.sampled_from([1, 1, 1, 2, 3]), min_size=1, max_size=24)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("start"), tokens, st.sampled_from(KEYS)),
        st.tuples(
            st.just("store"), st.integers(0, 9), st.sets(st.integers(1, 24), max_size=4)
        ),
        st.tuples(st.just("reserve"), st.integers(0, 9), st.integers(0, 40)),
        st.tuples(
            st.just("end"), st.integers(0, 9), st.sampled_from(["ok", "keep", "bad"])
        ),
        st.tuples(st.just("pin"), tokens, st.sampled_from(KEYS)),
        st.tuples(st.just("limit"), st.integers(10, 90), st.none()),
        st.tuples(st.just("clear"), st.none(), st.none()),
    ),
    max_size=50,
)


@pytest.fixture(autouse=True, scope="module")
def small_gaps():
    """Prompts of a few tokens are to have snapshots that are worth keeping, too."""
    before, eviction.THIN_TOKENS = eviction.THIN_TOKENS, 6
    yield
    eviction.THIN_TOKENS = before


def behave(bank, steps):
    """Do all that a bank is asked for, and compare what it would give up after each."""
    lookups, running = [], []
    for kind, what, more in steps:
        if kind == "start":
            lookups.append(bank.look_up(more, what))
            try:
                running.append(Request(bank, what, more))
            except KVBudgetError:
                continue
        elif kind == "pin":
            bank.pin(more, what[:4])
        elif kind == "limit":
            # What is pinned or runs cannot be given up.
            held = bool(running) or any(node.pins for node in bank._nodes())
            bank.limit(max(what * BYTES_PER_TOKEN, bank.nbytes if held else 0))
        elif kind == "clear":
            bank.clear()
        elif running:
            request = running[what % len(running)]
            if kind == "store":
                request.compute()
                request.store({index for index in more if index <= len(request.prompt)})
            elif kind == "reserve":
                request.lease.reserve(BYTES_PER_TOKEN * max(more, len(request.prompt)))
            else:
                running.remove(request)
                ways = {"ok": {}, "keep": {"keep_buffer": True}, "bad": {"intact": False}}
                request.end(**ways[more])
        bank.check()
        bank.compare()
        for lookup in lookups:
            assert lookup.match == bank.match(lookup.key, lookup.tokens)
    for request in running:
        request.end()


@settings(max_examples=300, deadline=None)
@given(steps, st.sampled_from([12, 40, 100_000]), st.sampled_from([None, 250, 700]))
def test_what_goes_is_what_a_search_through_everything_finds(steps, size, max_bytes):
    behave(WatchedBank(size, max_bytes=max_bytes), steps)


def test_every_kind_of_choice_is_made():
    """That the comparison has something to compare."""
    bank = WatchedBank(max_bytes=700)
    turns = []
    for first in (1, 2, 1, 3, 1, 4):
        prompt = [first, *[1] * 20]
        turns += [("start", prompt, HYBRID), ("store", 0, {2, 5, 9, 21}), ("end", 0, "ok")]
    behave(bank, turns * 3)
    assert bank.evictions > 5
    assert bank.thinned > 5
    assert bank.chosen > 30


def test_what_a_lookup_remembers_keeps_no_state_alive():
    bank = SessionBank(10)
    bank.store(DENSE, [1] * 10, TokenBuffer([1] * 10).rows, {})
    lookup = bank.look_up(DENSE, [1] * 10)
    (node,) = lookup.found()[1]
    bank.store(DENSE, [2] * 10, TokenBuffer([2] * 10).rows, {})
    assert node.rows is None
    assert lookup.match.length == 0
