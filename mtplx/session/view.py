"""The prefix tree as a value, for people to look at.

A bank may hold thousands of runs, and nobody looks at so many: those that were used last
and those that are longest are shown, each with all that leads to it, and the rest is
counted. Pure; the thread that owns the bank calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import nlargest

from mtplx.session.tree import Node, PrefixTree
from mtplx.types import BankNode, BankView, StateKey

MOST_NODES = 64
FIRST_TOKENS = 8


def view(trees: Mapping[StateKey, PrefixTree], *, most_nodes: int = MOST_NODES) -> BankView:
    """Return the nodes that most is to be seen of, in the order they are to be shown in:
    each one behind its parent, the most recently used branch first.

    Args:
        trees: As ``SessionBank.trees`` gives them.
        most_nodes: How many to show.
    """
    nodes = [node for tree in trees.values() for node in tree]
    shown = _choose(nodes, most_nodes)
    now = max((node.last_used for node in nodes), default=0)
    told: list[BankNode] = []
    for key, tree in trees.items():
        stack: list[tuple[Node, int | None]] = []
        _push(stack, tree.root, None, shown)
        while stack:
            node, parent = stack.pop()
            _push(stack, node, len(told), shown)
            told.append(_tell(key, node, parent, now))
    others = [node for node in nodes if node not in shown]
    return BankView(tuple(told), len(others), sum(map(_nbytes, others)))


def _choose(nodes: list[Node], most: int) -> set[Node]:
    if len(nodes) <= most:
        return {*nodes}
    recent = nlargest(most, nodes, key=lambda node: node.last_used)
    longest = nlargest(most, nodes, key=lambda node: len(node.tokens))
    shown: set[Node] = set()
    for pair in zip(recent, longest, strict=True):
        for node in pair:
            path = {above for above in _upward(node) if above not in shown}
            if len(shown) + len(path) <= most:
                shown |= path
    return shown


def _upward(node: Node) -> Iterable[Node]:
    """The node and all above it but the root."""
    above: Node | None = node
    while above is not None and above.parent is not None:
        yield above
        above = above.parent


def _push(
    stack: list[tuple[Node, int | None]], node: Node, index: int | None, shown: set[Node]
) -> None:
    below = [child for child in node.children.values() if child in shown]
    below.sort(key=lambda child: child.last_used)
    stack.extend((child, index) for child in below)


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
