"""What the SessionBank gives up first. Pure: it chooses, the bank acts.

Snapshots that save little go before any state that only they make reachable does; then
the least recently used leaves, as long as there are such, of what no second request
ever asked for; then the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from mtplx.session.ledger import Ledger
from mtplx.session.tree import Node, PrefixTree

ONE_OFF_SHARE = 0.2
"""Entries that were used once go before the others, as long as they are more than this
share of the tokens: else a bank full of old favourites would have no room for a new
conversation."""

THIN_TOKENS = 256
"""A snapshot may be thinned out when no more than this many tokens would have to be
computed to reach it from the one before."""


def evictable(nodes: Iterable[Node], ledger: Ledger) -> list[Node]:
    """Return the nodes that nothing holds: no pin, no request that runs in their buffer."""
    return [
        node for node in nodes if node.pins == 0 and not ledger.is_running(node.view.buffer)
    ]


def least_worth(nodes: Iterable[Node], ledger: Ledger) -> Node | None:
    """Return the leaf to evict; None where none may be."""
    nodes = list(nodes)
    idle = evictable(nodes, ledger)
    leaves = [node for node in idle if not node.children]
    one_off = [node for node in leaves if node.uses == 0]
    one_off_tokens = sum(len(node.tokens) for node in idle if node.uses == 0)
    if one_off and one_off_tokens > ONE_OFF_SHARE * sum(len(n.tokens) for n in nodes):
        leaves = one_off
    return min(leaves, key=lambda node: node.last_used, default=None)


def least_saving(trees: Iterable[PrefixTree]) -> tuple[Node, int] | None:
    """Return the node and index of the snapshot that saves the fewest tokens for its
    bytes; None where all are worth keeping.

    Never the last one before the end of a run of prompts, nor where prompts part, nor
    one that was ever used.
    """
    worst: tuple[float, Node, int] | None = None
    for tree in trees:
        stack = [(node, 0) for node in tree.root.children.values()]
        while stack:
            node, previous = stack.pop()
            for index in sorted(node.snapshots):
                kept = node.snapshots[index]
                gap, previous = index - previous, index
                needed = index == node.end and len(node.children) != 1
                if needed or node.pins or kept.uses or gap > THIN_TOKENS:
                    continue
                worth = gap / max(kept.snapshot.nbytes, 1)
                if worst is None or worth < worst[0]:
                    worst = (worth, node, index)
            stack.extend((child, previous) for child in node.children.values())
    return None if worst is None else worst[1:]
