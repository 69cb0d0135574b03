"""How much of a prompt can be restored, why no more, and where it leaves what is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtplx.metrics import Divergence
from mtplx.session.held import Held
from mtplx.session.state import TokenRun
from mtplx.session.tree import Node
from mtplx.types import StateKey

if TYPE_CHECKING:
    from mtplx.session.bank import SessionBank
    from mtplx.session.lease import Lease


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


class Lookup:
    """One prompt and what the bank has of it, from the queue to the start.

    It is looked up again only after the bank has changed: by what another request or the
    disk brought, or by what had to go. What it remembers keeps nothing alive.
    """

    def __init__(
        self, bank: SessionBank, held: Held, key: StateKey, tokens: TokenRun
    ) -> None:
        self.key = key
        self.tokens = tokens
        self._bank = bank
        self._held = held
        self._clock: int | None = None
        self._found: tuple[Match, list[Node]]

    @property
    def match(self) -> Match:
        """What can be restored now."""
        return self.found()[0]

    def found(self) -> tuple[Match, list[Node]]:
        """Return the match, and the nodes that the prompt enters."""
        if self._clock != self._held.clock:
            self._found = _find(self._held, self.key, self.tokens)
            self._clock = self._held.clock
        return self._found

    def acquire(self, reserve_bytes: int = 0) -> Lease:
        """See ``SessionBank.acquire``."""
        return self._bank.lend(self, reserve_bytes)


def _find(held: Held, key: StateKey, tokens: TokenRun) -> tuple[Match, list[Node]]:
    path, shared = held.trees.walk(key, tokens)
    usable = min(shared, max(len(tokens) - 1, 0))
    length = usable if key.any_prefix else _last_snapshot(path, usable)
    ahead, divergence = _find_divergence(path, tokens, shared)
    reason, reached = _reason(held, key, tokens, path, shared, length, ahead)
    lost = max(min(reached, len(tokens) - 1) - length, 0) if reason else 0
    return Match(length, shared, reason, lost, divergence), path


def _last_snapshot(path: list[Node], usable: int) -> int:
    for node in reversed(path):
        if indices := [index for index in node.snapshots if index <= usable]:
            return max(indices)
    return 0


def _reason(
    held: Held,
    key: StateKey,
    tokens: TokenRun,
    path: list[Node],
    shared: int,
    length: int,
    ahead: int,
) -> tuple[str | None, int]:
    """Return why no more can be restored, and how far it could have been.

    ``ahead`` is how far the bank goes on where the prompt leaves it.
    """
    if held.max_kv_size == 0 or held.max_bytes == 0:
        return "disabled", 0
    usable = min(shared, max(len(tokens) - 1, 0))
    whole = [node for node in path[-2:] if node.end <= shared]
    lost, why = held.forgotten.longest(key, tokens, whole[-1] if whole else None)
    if lost > usable:
        return why, lost
    if length < usable:
        return "no_snapshot", usable
    if ahead > usable:
        return "diverged", ahead
    if usable or len(tokens) < 2:
        return None, 0
    return ("other_model" if held.trees.only_others(key) else "never_seen"), 0


def _find_divergence(
    path: list[Node], tokens: TokenRun, shared: int
) -> tuple[int, Divergence | None]:
    """Return how far the bank goes on from where the prompt leaves it, and where that is;
    zero and None where it does not leave it.

    Of several ways it goes on the most recently used one counts.
    """
    if not path:
        return 0, None
    node = path[-1]
    if node.end == shared:
        node = node.latest or node
    if node.end == shared or shared == len(tokens):
        return 0, None
    kept = int(node.tokens[shared - node.start])
    while child := node.latest:
        node = child
    return node.end, Divergence(shared, kept, int(tokens[shared]))
