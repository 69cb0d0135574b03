"""How much of a prompt can be restored, and where it leaves what is held."""

from __future__ import annotations

from dataclasses import dataclass

from mtplx.metrics import Divergence
from mtplx.session.state import TokenRun
from mtplx.session.tree import Node


@dataclass(frozen=True)
class Match:
    """How much of a prompt can be restored, and why no more.

    Attributes:
        length: Tokens that can be restored, always less than the prompt: the last
            token is computed, since its logits are needed.
        shared_tokens: Longest prefix of the prompt that the bank knows, restorable
            or not.
        miss_reason: None where no more was held. Else ``disabled`` (the bank keeps
            nothing), ``evicted`` or ``too_large`` (it had to go, or did not fit),
            ``no_snapshot`` (known further than it can be resumed), ``diverged`` (what
            is held goes on differently), ``other_model`` (only state of other models or
            settings is held) or ``never_seen``.
        lost_tokens: Tokens that are computed for that reason.
        divergence: Where the prompt leaves what is held; None where it does not.
    """

    length: int
    shared_tokens: int
    miss_reason: str | None = None
    lost_tokens: int = 0
    divergence: Divergence | None = None


def find_divergence(
    path: list[Node], tokens: TokenRun, shared: int
) -> tuple[int, Divergence | None]:
    """Return how far the bank goes on from where the prompt leaves it, and where that is.

    Of several ways it goes on the most recently used one counts.
    """
    if not path:
        return 0, None
    node = path[-1]
    if node.end == shared and node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
    held = node.end
    if held == shared or shared == len(tokens):
        return shared, None
    kept = int(node.tokens[shared - node.start])
    while node.children:
        node = max(node.children.values(), key=lambda child: child.last_used)
        held = node.end
    return held, Divergence(shared, kept, int(tokens[shared]))
