"""The store of responses alone: bounds, owners, and what items are held for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.errors import ResponseNotFoundError
from mtplx.server.responses_api.store import Item, ResponseStore, StoredResponse


def message(name: str, text: str = "") -> Item:
    return {"id": f"msg_{name}", "type": "message", "content": text}


def response(
    name: str, *, read: Sequence[Item] = (), owner: str | None = None, text: str = ""
) -> StoredResponse:
    output = [message(f"{name}-answer", text)]
    return StoredResponse(owner, {"id": name, "output": output}, tuple(read))


def stored(store: ResponseStore, *names: str) -> list[bool]:
    """Return which of ``names`` are there. Asking is using, so ask once."""
    return [store.find(name, None) is not None for name in names]


def test_a_response_exists_for_its_owner_only() -> None:
    store = ResponseStore()
    store.put(response("a", owner="ann"))
    assert store.get("a", "ann").response_id == "a"
    assert store.item("msg_a-answer", "ann")["id"] == "msg_a-answer"
    for owner in ("bob", None):
        with pytest.raises(ResponseNotFoundError):
            store.get("a", owner)
        with pytest.raises(ResponseNotFoundError):
            store.item("msg_a-answer", owner)
        with pytest.raises(ResponseNotFoundError):
            store.delete("a", owner)
    store.check()


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    store = ResponseStore(max_responses=2)
    store.put(response("a"))
    store.put(response("b"))
    store.get("a", None)
    store.put(response("c"))
    assert stored(store, "a", "b", "c") == [True, False, True]
    store.check()


def test_bytes_are_bounded() -> None:
    store = ResponseStore(max_bytes=2_000)
    store.put(response("a", text="x" * 900))
    store.put(response("b", text="x" * 900))
    store.check()
    store.put(response("c", text="x" * 900))
    assert stored(store, "a", "b", "c") == [False, True, True]
    store.put(response("d", text="x" * 5_000))
    assert (len(store), store.nbytes) == (0, 0)
    store.check()


def test_a_conversation_is_held_once() -> None:
    store = ResponseStore()
    store.put(response("a", read=[message("hello", "x" * 1_000)]))
    before = store.nbytes
    store.put(response("b", read=store.get("a", None).items))
    assert store.nbytes - before < 200
    store.delete("a", None)
    store.check()
    # It outlives the response that brought it.
    assert store.get("b", None).read[0]["content"] == "x" * 1_000
    assert store.item("msg_hello", None)["content"] == "x" * 1_000
    store.delete("b", None)
    with pytest.raises(ResponseNotFoundError):
        store.item("msg_hello", None)
    assert store.nbytes == 0


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 9)), max_size=40))
def test_invariants_hold_after_any_steps(steps: list[tuple[str, int]]) -> None:
    store = ResponseStore(max_responses=4, max_bytes=900)
    for number, (step, which) in enumerate(steps):
        name = f"r{which}"
        try:
            if step == "p":
                earlier = store.get(name, None).items if number % 2 else ()
                store.put(response(f"r{number}", read=earlier, text="x" * which * 20))
            elif step == "g":
                store.get(name, None)
            else:
                store.delete(name, None)
        except ResponseNotFoundError:
            pass
        store.check()
        assert len(store) <= 4
