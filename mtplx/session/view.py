"""The prefix tree as a value, for people to look at.

A bank may hold many thousands of runs, and nobody looks at so many: of those that were
used last, the latest and the longest are shown, each with all that leads to it, and the
rest is counted. What this takes does not grow with the bank. Pure; the thread that owns
the bank calls it.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush, nlargest
from itertools import count, islice

from mtplx.session.tree import Node
from mtplx.types import BankNode, BankView, StateKey

MOST_NODES = 64
FIRST_TOKENS = 8
_LOOKED_AT = 1000

Roots = Iterable[tuple[StateKey, Node]]


def view(roots: Roots, entries: int, *, most_nodes: int = MOST_NODES) -> BankView:
    """Return the nodes that most is to be seen of, in the order they are to be shown in:
    each one behind its parent, the most recently used branch first.

    Args:
        roots: Of each key.
        entries: How many nodes there are.
        most_nodes: How many to show.
    """
    keys = [*roots]
    nodes = _latest([root for _, root in keys])
    shown = _choose(nodes, most_nodes)
    now = max((node.last_used for node in nodes), default=0)
    told: list[BankNode] = []
    for key, root in keys:
        stack = _below(root, None, shown)
        while stack:
            node, parent = stack.pop()
            stack += _below(node, len(told), shown)
            told.append(_tell(key, node, parent, now))
    return BankView(tuple(told), entries - len(told))


def _latest(roots: list[Node]) -> list[Node]:
    """The nodes that were used last, each behind its parent."""
    order = count()
    heap: list[tuple[int, int, Node]] = []
    found: list[Node] = []
    for root in roots:
        _push(heap, root, order)
    while heap and len(found) < _LOOKED_AT:
        node = heappop(heap)[-1]
        found.append(node)
        _push(heap, node, order)
    return found


def _push(heap: list[tuple[int, int, Node]], node: Node, order: count[int]) -> None:
    # They stand in the order of their last use.
    for child in islice(reversed(node.children.values()), _LOOKED_AT):
        heappush(heap, (-child.last_used, next(order), child))


def _choose(nodes: list[Node], most: int) -> set[Node]:
    if len(nodes) <= most:
        return {*nodes}
    longest = nlargest(len(nodes), nodes, key=lambda node: len(node.tokens))
    shown: set[Node] = set()
    for pair in zip(nodes, longest, strict=True):
        for node in pair:
            path = {above for above in _upward(node) if above not in shown}
            if len(shown) + len(path) <= most:
                shown |= path
        if len(shown) == most:
            break
    return shown


def _upward(node: Node) -> Iterable[Node]:
    """The node and all above it but the root."""
    above: Node | None = node
    while above is not None and above.parent is not None:
        yield above
        above = above.parent


def _below(
    node: Node, index: int | None, shown: set[Node]
) -> list[tuple[Node, int | None]]:
    latest = islice(reversed(node.children.values()), _LOOKED_AT)
    return [(child, index) for child in latest if child in shown][::-1]


def _tell(key: StateKey, node: Node, parent: int | None, now: int) -> BankNode:
    return BankNode(
        parent=parent,
        fingerprint=key.fingerprint,
        namespace=key.namespace,
        start=node.start,
        end=node.end,
        first_tokens=tuple(map(int, node.tokens[:FIRST_TOKENS])),
        nbytes=_nbytes(node),
        snapshots=tuple(sorted(node.snapshots)),
        uses=node.uses,
        age=now - node.last_used,
        pinned=node.pins > 0,
        children=len(node.children),
    )


def _nbytes(node: Node) -> int:
    snapshots = sum(kept.snapshot.nbytes for kept in node.snapshots.values())
    return node.view.nbytes + snapshots
