"""Who holds which buffer, and how many bytes that is.

A buffer is held by the nodes whose rows are views of it, and by the request that runs
in it, if one does. Its bytes count once, however many views there are; while a request
runs they count as what was reserved for it, if that is more. A buffer that nobody holds
is freed by being forgotten here. ``nbytes`` is the sum, kept up to date.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mtplx.session.state import Buffer
from mtplx.session.tree import Node


@dataclass
class _Holding:
    buffer: Buffer
    nodes: set[Node] = field(default_factory=set)
    running: bool = False
    reserved: int = 0
    counted: int = 0


class Ledger:
    """The buffers of a bank.

    Attributes:
        nbytes: Bytes of all of them.
        running_nbytes: Those of buffers that requests run in.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.running_nbytes = 0
        self._holdings: dict[int, _Holding] = {}

    def attach(self, node: Node) -> None:
        """Note that ``node`` has a view now."""
        holding = self._of(node.view.buffer)
        holding.nodes.add(node)
        self._count(holding)

    def detach(self, node: Node) -> None:
        """Note that ``node`` gives its view up."""
        holding = self._of(node.view.buffer)
        holding.nodes.discard(node)
        self._count(holding)

    def run(self, buffer: Buffer, reserved: int) -> None:
        """Note that a request writes to ``buffer``, and the bytes it may reach."""
        holding = self._of(buffer)
        self._uncount(holding)
        holding.running, holding.reserved = True, reserved
        self._count(holding)

    def rest(self, buffer: Buffer) -> None:
        """Note that nobody writes to ``buffer`` any more."""
        holding = self._of(buffer)
        self._uncount(holding)
        holding.running, holding.reserved = False, 0
        self._count(holding)

    def is_running(self, buffer: Buffer) -> bool:
        """Say whether a request writes to it."""
        holding = self._holdings.get(id(buffer))
        return holding is not None and holding.running

    def nodes(self, buffer: Buffer) -> list[Node]:
        """Return the nodes with views of it, in the order of their rows."""
        holding = self._holdings.get(id(buffer))
        nodes = () if holding is None else holding.nodes
        return sorted(nodes, key=lambda node: node.view.start)

    def refresh(self) -> None:
        """Weigh the buffers that may have grown."""
        for holding in [h for h in self._holdings.values() if h.running]:
            self._count(holding)

    def check(self, nodes: Iterable[Node]) -> None:
        """Verify that what is noted is what ``nodes`` hold.

        Raises:
            AssertionError: It is not.
        """
        self.refresh()
        views = {node: node.view.buffer for node in nodes}
        noted = {n: h.buffer for h in self._holdings.values() for n in h.nodes}
        assert {n: id(b) for n, b in views.items()} == {n: id(b) for n, b in noted.items()}
        assert self.nbytes == sum(h.counted for h in self._holdings.values())
        assert all(h.nodes or h.running for h in self._holdings.values())

    def _of(self, buffer: Buffer) -> _Holding:
        return self._holdings.setdefault(id(buffer), _Holding(buffer))

    def _count(self, holding: _Holding) -> None:
        self._uncount(holding)
        if holding.running:
            holding.counted = max(holding.buffer.nbytes, holding.reserved)
            self.running_nbytes += holding.counted
        elif holding.nodes:
            holding.counted = holding.buffer.nbytes
        else:
            del self._holdings[id(holding.buffer)]
        self.nbytes += holding.counted

    def _uncount(self, holding: _Holding) -> None:
        self.nbytes -= holding.counted
        if holding.running:
            self.running_nbytes -= holding.counted
        holding.counted = 0
