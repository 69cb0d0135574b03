"""Who holds which buffer, and how many bytes that is.

A buffer is held by the nodes whose rows are views of it, and by the request that runs
in it, if one does. Its bytes count once, however many views there are; while a request
runs they count as what was reserved for it, if that is more. A buffer that nobody holds
is freed by being forgotten here. ``nbytes`` is the sum, kept up to date.

A buffer that nobody runs in does not change: it is weighed when it comes to rest.
Those that requests run in may have grown since; ``refresh()`` weighs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mtplx.session.state import Buffer, Rows
from mtplx.session.tree import Node

WASTE_SHARE = 0.25
"""Of a buffer, that may be held for nothing; copying what is needed costs more."""

WASTE_BYTES = 1 << 20
"""The same, whatever the share, as long as there is room."""


@dataclass(slots=True)
class _Holding:
    """What is noted of a buffer: who holds it, and the rows that its nodes have of it."""

    buffer: Buffer
    nodes: set[Node] = field(default_factory=set)
    rows: int = 0
    row_nbytes: int = 0
    running: bool = False
    reserved: int = 0
    counted: int = 0

    @property
    def waste(self) -> int:
        """Bytes that are held for nothing; only at rest is that known."""
        return 0 if self.running else self.counted - self.rows * self.row_nbytes

    @property
    def is_wasteful(self) -> bool:
        """So much that copying what is needed costs less."""
        return self.waste > WASTE_SHARE * self.counted


class Ledger:
    """The buffers of a bank.

    Args:
        changed: Told each node whose buffer begins to run, or to rest, or that moves
            from one that runs to one that rests, or the other way round.

    Attributes:
        nbytes: Bytes of all of them.
        running_nbytes: Those of buffers that requests run in.
    """

    def __init__(self, changed: Callable[[Node], None]) -> None:
        self.nbytes = 0
        self.running_nbytes = 0
        self._changed = changed
        self._holdings: dict[int, _Holding] = {}
        self._running: dict[int, _Holding] = {}
        self._wasteful: dict[int, _Holding] = {}

    def attach(self, node: Node) -> None:
        """Note that ``node`` has a view now."""
        holding = self._of(node.view.buffer)
        holding.nodes.add(node)
        holding.rows += len(node.tokens)
        node.running = holding.running
        if not holding.running and len(holding.nodes) == 1:
            self._weigh(holding)
        self._note_waste(holding)

    def detach(self, node: Node) -> None:
        """Note that ``node`` gives its view up."""
        holding = self._of(node.view.buffer)
        holding.nodes.discard(node)
        holding.rows -= len(node.tokens)
        self._note_waste(holding)
        self._drop_unheld(holding)

    def split(self, upper: Node, lower: Node) -> None:
        """Note that ``upper`` has part of the view that ``lower`` had."""
        self._of(lower.view.buffer).nodes.add(upper)
        upper.running = lower.running

    def run(self, buffer: Buffer, reserved: int) -> None:
        """Note that a request writes to ``buffer``, and the bytes it may reach."""
        holding = self._of(buffer)
        holding.reserved = reserved
        self._set_running(holding, True)

    def rest(self, buffer: Buffer) -> None:
        """Note that nobody writes to ``buffer`` any more."""
        holding = self._of(buffer)
        holding.reserved = 0
        self._set_running(holding, False)
        self._drop_unheld(holding)

    def is_running(self, buffer: Buffer) -> bool:
        """Say whether a request writes to it."""
        return id(buffer) in self._running

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
        ran = node.running
        self.detach(node)
        node.rows = rows
        self.attach(node)
        if node.running != ran:
            self._changed(node)

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
        mine = Counter(id(node.view.buffer) for node in path)
        freed = {id for id, n in mine.items() if n == len(self._holdings[id].nodes)}
        for node in path:
            if not node.running and id(node.view.buffer) in freed:
                self.set_rows(node, rows(node.start, node.end))

    def save_waste(self, buffer: Buffer, least_bytes: int = WASTE_BYTES) -> None:
        """Copy what is held of a buffer that is mostly held for nothing.

        For a moment both are held; a budget is not all of the memory.
        """
        holding = self._wasteful.get(id(buffer))
        if holding is not None and holding.waste > least_bytes:
            self.move_out(self.nodes(buffer))

    def squeeze(self) -> bool:
        """Save some of the waste that is too little to bother about while there is room;
        False where there is none."""
        holding = next(iter(self._wasteful.values()), None)
        if holding is None:
            return False
        self.move_out(self.nodes(holding.buffer))
        return True

    def refresh(self) -> None:
        """Weigh the buffers that may have grown."""
        for holding in self._running.values():
            self._weigh(holding)

    def check(self, nodes: Iterable[Node]) -> None:
        """Verify that what is noted is what ``nodes`` hold.

        Raises:
            AssertionError: It is not.
        """
        self.refresh()
        views = {node: node.view.buffer for node in nodes}
        holdings = self._holdings.values()
        noted = {n: h.buffer for h in holdings for n in h.nodes}
        assert {n: id(b) for n, b in views.items()} == {n: id(b) for n, b in noted.items()}
        assert all(h.rows == sum(len(n.tokens) for n in h.nodes) for h in holdings)
        assert all(n.running == h.running for h in holdings for n in h.nodes)
        assert all(h.nodes or h.running for h in holdings)
        assert all(h.running or h.counted == h.buffer.nbytes for h in holdings)
        assert self.nbytes == sum(h.counted for h in holdings)
        running = [h for h in holdings if h.running]
        assert self.running_nbytes == sum(h.counted for h in running)
        assert {id(h) for h in running} == {id(h) for h in self._running.values()}
        wasteful = {id(h) for h in holdings if h.nodes and h.is_wasteful}
        assert wasteful == {id(h) for h in self._wasteful.values()}

    def _of(self, buffer: Buffer) -> _Holding:
        holding = self._holdings.get(id(buffer))
        if holding is None:
            holding = self._holdings[id(buffer)] = _Holding(buffer)
        return holding

    def _set_running(self, holding: _Holding, running: bool) -> None:
        self._count(holding, 0)
        holding.running = running
        if running:
            self._running[id(holding.buffer)] = holding
        else:
            self._running.pop(id(holding.buffer), None)
        self._weigh(holding)
        self._note_waste(holding)
        for node in holding.nodes:
            if node.running != running:
                node.running = running
                self._changed(node)

    def _weigh(self, holding: _Holding) -> None:
        self._count(holding, max(holding.buffer.nbytes, holding.reserved))
        if holding.nodes and not holding.running:
            view = next(iter(holding.nodes)).view
            holding.row_nbytes = view.nbytes // len(view)

    def _count(self, holding: _Holding, nbytes: int) -> None:
        self.nbytes += nbytes - holding.counted
        if holding.running:
            self.running_nbytes += nbytes - holding.counted
        holding.counted = nbytes

    def _note_waste(self, holding: _Holding) -> None:
        if holding.nodes and holding.is_wasteful:
            self._wasteful[id(holding.buffer)] = holding
        else:
            self._wasteful.pop(id(holding.buffer), None)

    def _drop_unheld(self, holding: _Holding) -> None:
        if not holding.nodes and not holding.running:
            self._count(holding, 0)
            del self._holdings[id(holding.buffer)]


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
