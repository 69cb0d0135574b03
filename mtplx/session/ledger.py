"""Who holds which buffer, and how many bytes that is.

A buffer is held by the nodes whose rows are views of it, and by the request that runs
in it, if one does. Its bytes count once, however many views there are; while a request
runs they count as what was reserved for it, if that is more. A buffer that nobody holds
is freed by being forgotten here. ``nbytes`` is the sum, kept up to date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mtplx.session.state import Buffer, Rows
from mtplx.session.tree import Node

WASTE_SHARE = 0.25
"""Of a buffer, that may be held for nothing; copying what is needed costs more."""

WASTE_BYTES = 1 << 20
"""The same, whatever the share, as long as there is room."""


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

    def counted(self, buffer: Buffer) -> int:
        """Return the bytes that a buffer counts as."""
        holding = self._holdings.get(id(buffer))
        return 0 if holding is None else holding.counted

    def nodes(self, buffer: Buffer) -> list[Node]:
        """Return the nodes with views of it, in the order of their rows."""
        holding = self._holdings.get(id(buffer))
        nodes = () if holding is None else holding.nodes
        return sorted(nodes, key=lambda node: node.view.start)

    def set_rows(self, node: Node, rows: Rows) -> None:
        """Give a node another view of the same rows."""
        self.detach(node)
        node.rows = rows
        self.attach(node)

    def move_out(self, nodes: list[Node]) -> None:
        """Copy the rows of ``nodes``, all of one buffer, so that they leave it."""
        for group in _adjacent(nodes):
            first, last = group[0], group[-1]
            start = first.view.start
            end = last.view.start + len(last.view)
            copied = first.view.buffer.copy(start, end)
            for node in group:
                at = node.view.start - start
                self.set_rows(node, copied.slice(at, at + len(node.view)))

    def move_in(self, path: list[Node], rows: Callable[[int, int], Rows]) -> None:
        """Let nodes be views of a running request's buffer, where that frees theirs."""
        mine = set(path)
        for node in path:
            buffer = node.view.buffer
            if not self.is_running(buffer) and mine.issuperset(self.nodes(buffer)):
                self.set_rows(node, rows(node.start, node.end))

    def save_waste(self, buffer: Buffer, least_bytes: int = WASTE_BYTES) -> bool:
        """Copy what is held of a buffer that is mostly held for nothing.

        For a moment both are held; a budget is not all of the memory.
        """
        nodes = self.nodes(buffer)
        if not nodes or self.is_running(buffer):
            return False
        waste = buffer.nbytes - sum(node.view.nbytes for node in nodes)
        if waste <= max(WASTE_SHARE * buffer.nbytes, least_bytes):
            return False
        self.move_out(nodes)
        return True

    def squeeze(self) -> bool:
        """Save some of the waste that is too little to bother about while there is room;
        False where there is none."""
        buffers = [holding.buffer for holding in self._holdings.values()]
        return any(self.save_waste(buffer, 0) for buffer in buffers)

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


def _adjacent(nodes: list[Node]) -> Iterator[list[Node]]:
    """Group nodes of one buffer whose rows follow one another."""
    group: list[Node] = []
    for node in sorted(nodes, key=lambda node: node.view.start):
        if group and node.view.start != group[-1].view.start + len(group[-1].view):
            yield group
            group = []
        group.append(node)
    if group:
        yield group
