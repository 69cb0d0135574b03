"""The store of KV state by token prefix.

A radix tree for each ``StateKey``: an edge of the tree is a run of token ids with the
KV rows of exactly those tokens, so that conversations that begin alike hold their
common part once. Layers that cannot be cut (windowed, recurrent) keep snapshots at
single indices inside the runs. The state itself is opaque: rows can be sliced and
weighed, snapshots weighed; ``models/cache.py`` makes both.

Invariants, which ``check()`` verifies:

1. The runs of a node's children begin with different tokens, and no run is empty.
2. A node has as many rows as tokens; snapshot indices lie in ``(start, end]``.
3. ``tokens`` and ``nbytes`` are the sums over all nodes, and stay within
   ``max_kv_size`` and ``max_bytes``.
4. A node with a lease, or with a descendant that has one, is never evicted.

The thread that runs the model owns the bank: the engine thread in a server. Only the
integer counters may be read from elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mtplx.types import StateKey

logger = logging.getLogger(__name__)

TokenRun = npt.NDArray[np.int32]


class Rows(Protocol):
    """The KV rows of a run of tokens. Never written to once stored."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def slice(self, start: int, end: int) -> Rows: ...


class Snapshot(Protocol):
    """The state of every layer that cannot be cut, at one index. Never written to."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Match:
    """How much of a prompt can be restored.

    Attributes:
        length: Tokens that can be restored, always less than the prompt: the last
            token is computed, since its logits are needed.
        shared_tokens: Longest prefix of the prompt that the bank knows, restorable
            or not.
        miss_reason: None when ``length`` is not 0; else ``"disabled"`` (the bank
            keeps nothing), ``"other_model"`` (only state of other models is held),
            ``"never_seen"`` (no stored prompt begins like this one) or
            ``"no_snapshot"`` (a prefix is known, without a snapshot inside it).
    """

    length: int
    shared_tokens: int
    miss_reason: str | None


class Lease:
    """State on loan: pinned until ``release()``, which may be called twice.

    Attributes:
        match: What was found.
        rows: Pieces whose lengths add up to ``match.length``, in order.
        snapshot: The snapshot at ``match.length``; None where none is needed.
    """

    def __init__(self, bank: SessionBank, match: Match, nodes: list[_Node]) -> None:
        self.match = match
        self.rows = tuple(_head(node, match.length) for node in nodes)
        # A pin on the deepest node holds the whole path: only leaves are evicted.
        self._node = nodes[-1] if nodes else None
        self.snapshot = self._node.snapshots.get(match.length) if self._node else None
        self._bank = bank
        if self._node is not None:
            self._node.pins += 1
            bank.pinned += 1

    def release(self) -> None:
        """Give the pin back."""
        if self._node is not None:
            self._node.pins -= 1
            self._bank.pinned -= 1
            self._node = None
            self.rows = ()
            self.snapshot = None


class _Node:
    """One run of tokens, ``[start, end)`` of every prompt that passes through it."""

    __slots__ = (
        "children",
        "last_used",
        "parent",
        "pins",
        "rows",
        "snapshots",
        "start",
        "tokens",
    )

    def __init__(
        self, tokens: TokenRun, start: int, rows: Rows | None, parent: _Node | None
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.rows = rows
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.snapshots: dict[int, Snapshot] = {}
        self.last_used = 0
        self.pins = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        rows = 0 if self.rows is None else self.rows.nbytes
        return rows + sum(snapshot.nbytes for snapshot in self.snapshots.values())


class SessionBank:
    """Keeps KV state in memory and finds it again by token ids.

    Args:
        max_kv_size: Most tokens to hold; 0 keeps nothing.
        max_bytes: Most bytes to hold; None leaves the limit to ``max_kv_size``.
        model: The model that ``restore_or_prefill_prompt_state`` uses when it is
            given none.
    """

    def __init__(
        self,
        max_kv_size: int = 256_000,
        *,
        max_bytes: int | None = None,
        model: Any = None,
    ) -> None:
        if max_kv_size < 0 or (max_bytes is not None and max_bytes < 0):
            raise ValueError("max_kv_size and max_bytes must not be negative.")
        self.max_kv_size = max_kv_size
        self.max_bytes = max_bytes
        self.model = model
        self.tokens = 0
        self.nbytes = 0
        self.entries = 0
        self.pinned = 0
        self.evictions = 0
        self.too_large = 0
        self._roots: dict[StateKey, _Node] = {}
        self._clock = 0

    # -- finding ----------------------------------------------------------------

    def match(self, key: StateKey, token_ids: Sequence[int]) -> Match:
        """Say how much of ``token_ids`` can be restored. Changes nothing.

        Every caller that wants to know (admission, planner, metrics, dry runs) asks
        here or through ``acquire``, which restores exactly this much.
        """
        return self._match(key, _run(token_ids))[0]

    def acquire(self, key: StateKey, token_ids: Sequence[int]) -> Lease:
        """Find the longest restorable prefix, mark it used and pin it."""
        match, path = self._match(key, _run(token_ids))
        used = [node for node in path if node.start < match.length]
        self._clock += 1
        for node in used:
            node.last_used = self._clock
        return Lease(self, match, used)

    def _match(self, key: StateKey, tokens: TokenRun) -> tuple[Match, list[_Node]]:
        path, shared = self._walk(key, tokens)
        usable = min(shared, max(len(tokens) - 1, 0))
        if key.any_prefix:
            length = usable
        else:
            indices = (index for node in path for index in node.snapshots)
            length = max((index for index in indices if index <= usable), default=0)
        reason = None if length else self._miss_reason(key, shared)
        return Match(length, shared, reason), path

    def _miss_reason(self, key: StateKey, shared: int) -> str:
        if self.max_kv_size == 0 or self.max_bytes == 0:
            return "disabled"
        if shared:
            return "no_snapshot"
        others = any(root.children for other, root in self._roots.items() if other != key)
        mine = key in self._roots and self._roots[key].children
        return "other_model" if others and not mine else "never_seen"

    def _walk(self, key: StateKey, tokens: TokenRun) -> tuple[list[_Node], int]:
        """Follow ``tokens`` down the tree: the nodes entered, and how far they agree."""
        path: list[_Node] = []
        node, depth = self._roots.get(key), 0
        while node is not None and depth < len(tokens):
            node = node.children.get(int(tokens[depth]))
            if node is None:
                break
            path.append(node)
            common = _common_length(node.tokens, tokens[depth:])
            depth += common
            if common < len(node.tokens):
                break
        return path, depth

    # -- storing ----------------------------------------------------------------

    def store(
        self,
        key: StateKey,
        token_ids: Sequence[int],
        rows: Callable[[int, int], Rows],
        snapshots: Mapping[int, Snapshot],
    ) -> int:
        """Keep the state of ``token_ids``; only what the bank lacks is taken.

        Args:
            key: Of the model that computed the state.
            token_ids: The tokens whose state is complete.
            rows: Called with ``(start, end)`` for the rows of those tokens. What it
                returns must not share memory that anyone writes to.
            snapshots: State of the layers that cannot be cut, by index in
                ``(0, len(token_ids)]``.

        Returns:
            Tokens that are newly held. State that does not fit whole is cut to the
            longest prefix that does.
        """
        tokens = _run(token_ids)
        if not key.any_prefix:
            # Rows behind the last snapshot could never be resumed.
            tokens = tokens[: max(snapshots, default=0)]
        if len(tokens) > self.max_kv_size > 0:
            self._warn_too_large(f"{len(tokens)} tokens, max_kv_size {self.max_kv_size}")
        tokens = tokens[: self.max_kv_size]
        if len(tokens) == 0 or self.max_bytes == 0:
            return 0
        path, shared = self._walk(key, tokens)
        parent = self._parent_at(key, path, shared)
        added = 0
        # The path must survive the eviction that makes room for its own end.
        parent.pins += 1
        try:
            if shared < len(tokens):
                added = self._append(parent, tokens[shared:], rows)
            self._add_snapshots(key, tokens[: shared + added], snapshots)
        finally:
            parent.pins -= 1
        return added

    def _parent_at(self, key: StateKey, path: list[_Node], depth: int) -> _Node:
        """Return the node that ends at ``depth``, splitting a run if need be."""
        if not path:
            return self._roots.setdefault(key, _Node(_run(()), 0, None, None))
        node = path[-1]
        return node if node.end == depth else self._split(node, depth)

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut ``node`` at index ``at``; return the new upper half.

        The lower half stays the same object, so leases on it stay good.
        """
        assert node.parent is not None
        assert node.rows is not None
        cut = at - node.start
        upper = _Node(node.tokens[:cut], node.start, node.rows.slice(0, cut), node.parent)
        upper.last_used = node.last_used
        upper.snapshots = {i: s for i, s in node.snapshots.items() if i <= at}
        before = node.nbytes
        node.parent.children[int(upper.tokens[0])] = upper
        node.snapshots = {i: s for i, s in node.snapshots.items() if i > at}
        node.rows = node.rows.slice(cut, len(node.tokens))
        node.tokens = node.tokens[cut:]
        node.start = at
        node.parent = upper
        upper.children[int(node.tokens[0])] = node
        self.entries += 1
        self.nbytes += upper.nbytes + node.nbytes - before
        return upper

    def _append(
        self, parent: _Node, tokens: TokenRun, rows: Callable[[int, int], Rows]
    ) -> int:
        self._make_room(len(tokens), 0)
        tokens = tokens[: max(self.max_kv_size - self.tokens, 0)]
        if len(tokens) == 0:
            return 0
        start = parent.end
        piece = rows(start, start + len(tokens))
        assert len(piece) == len(tokens)
        if not self._make_room(len(tokens), piece.nbytes):
            self._warn_too_large(f"{piece.nbytes} bytes, max_bytes {self.max_bytes}")
            return 0
        node = _Node(tokens.copy(), start, piece, parent)
        self._clock += 1
        node.last_used = self._clock
        parent.children[int(tokens[0])] = node
        self.tokens += len(tokens)
        self.nbytes += node.nbytes
        self.entries += 1
        return len(tokens)

    def _add_snapshots(
        self, key: StateKey, tokens: TokenRun, snapshots: Mapping[int, Snapshot]
    ) -> None:
        path, depth = self._walk(key, tokens)
        if path:
            path[-1].pins += 1
        try:
            for index, snapshot in sorted(snapshots.items()):
                node = next((n for n in path if n.start < index <= min(n.end, depth)), None)
                if node is None or index in node.snapshots:
                    continue
                if self._make_room(0, snapshot.nbytes):
                    node.snapshots[index] = snapshot
                    self.nbytes += snapshot.nbytes
                else:
                    self._warn_too_large(
                        f"a snapshot of {snapshot.nbytes} bytes, max_bytes {self.max_bytes}"
                    )
        finally:
            if path:
                path[-1].pins -= 1

    # -- room -------------------------------------------------------------------

    def _make_room(self, tokens: int, nbytes: int) -> bool:
        """Evict the least recently used leaves until that much more fits."""
        while not self._fits(tokens, nbytes):
            leaves = [n for n in self._nodes() if not n.children and n.pins == 0]
            if not leaves:
                return False
            self._evict(min(leaves, key=lambda node: node.last_used))
        return True

    def _fits(self, tokens: int, nbytes: int) -> bool:
        bytes_fit = self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes
        return bytes_fit and self.tokens + tokens <= self.max_kv_size

    def _evict(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]
        self.tokens -= len(node.tokens)
        self.nbytes -= node.nbytes
        self.entries -= 1
        self.evictions += 1

    def _warn_too_large(self, numbers: str) -> None:
        if self.too_large == 0:
            logger.warning(
                "State too large for the SessionBank is kept only in part (%s). "
                "Raise the limit to reuse all of it.",
                numbers,
            )
        self.too_large += 1

    def clear(self) -> None:
        """Forget everything that is not pinned."""
        while leaves := [n for n in self._nodes() if not n.children and n.pins == 0]:
            for leaf in leaves:
                self._evict(leaf)

    # -- looking ----------------------------------------------------------------

    def _nodes(self) -> Iterator[_Node]:
        stack = [node for root in self._roots.values() for node in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check(self) -> None:
        """Verify the invariants in the head of this file.

        Raises:
            AssertionError: One of them does not hold.
        """
        tokens = nbytes = entries = 0
        for node in self._nodes():
            assert node.parent is not None
            assert len(node.tokens) > 0
            assert node.start == node.parent.end
            assert node.parent.children[int(node.tokens[0])] is node
            assert node.rows is not None
            assert len(node.rows) == len(node.tokens)
            assert all(node.start < index <= node.end for index in node.snapshots)
            assert node.pins >= 0
            tokens += len(node.tokens)
            nbytes += node.nbytes
            entries += 1
        assert (tokens, nbytes, entries) == (self.tokens, self.nbytes, self.entries)
        assert tokens <= self.max_kv_size
        assert self.max_bytes is None or nbytes <= self.max_bytes


def _run(token_ids: Sequence[int]) -> TokenRun:
    return np.asarray(token_ids, dtype=np.int32)


def _common_length(a: TokenRun, b: TokenRun) -> int:
    n = min(len(a), len(b))
    different = a[:n] != b[:n]
    return int(different.argmax()) if different.any() else n


def _head(node: _Node, end: int) -> Rows:
    """Return the rows of ``node`` up to index ``end`` of the prompt."""
    assert node.rows is not None
    if end >= node.end:
        return node.rows
    return node.rows.slice(0, end - node.start)
