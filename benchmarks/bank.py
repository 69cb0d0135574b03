"""The SessionBank at scale: what its operations take when it is full.

    python benchmarks/bank.py

Builds banks of about 100, 1,000 and 10,000 entries of 20 tokens, from conversations that
share system prompts, go on for several turns and part where an answer was asked for
again; every second one is of a model whose state cannot be cut, and has snapshots. Tokens
and bytes are both at their limit. The state weighs something and is nothing: no model
is needed.

Prints for each operation the median, the 99th percentile and the worst in milliseconds,
and exits with 1 if a median is above 1 ms, a worst above 5 ms, or a median of the largest
bank above twice that of the smallest (and above 0.05 ms). It is the time of the thread:
what other processes of a busy machine take is not the bank's. Nor are passes of Python's
garbage collector, which walk all that the process has, whoever they interrupt; they are
counted for themselves.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mtplx.errors import KVBudgetError
from mtplx.session import Lease, SessionBank
from mtplx.session.state import TokenRun
from mtplx.session.tree import as_run
from mtplx.types import StateKey

SIZES = (100, 1_000, 10_000)
ENTRY_TOKENS = 20
ROW_BYTES = 1_000
SNAPSHOT_BYTES = 20_000
STEP_TOKENS = 32
"""Buffers grow by so much, as those of real caches do by 256."""

MEDIAN_MS = 1.0
WORST_MS = 5.0
FLAT = 2.0
FLAT_FROM_MS = 0.05
LEAST_SAMPLES = 30

KEYS = (StateKey("dense", any_prefix=True), StateKey("hybrid", any_prefix=False))


class Buffer:
    """Memory of a sequence that is only weighed."""

    __slots__ = ("tokens",)

    def __init__(self, tokens: int = 0) -> None:
        self.tokens = tokens

    @property
    def nbytes(self) -> int:
        return -(-self.tokens // STEP_TOKENS) * STEP_TOKENS * ROW_BYTES

    def rows(self, start: int, end: int) -> Rows:
        return Rows(self, start, end)

    def copy(self, start: int, end: int) -> Rows:
        return Rows(Buffer(end - start), 0, end - start)


@dataclass(frozen=True, slots=True)
class Rows:
    buffer: Buffer
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return len(self) * ROW_BYTES

    def __len__(self) -> int:
        return self.end - self.start

    def slice(self, start: int, end: int) -> Rows:
        return Rows(self.buffer, self.start + start, self.start + end)


@dataclass(frozen=True, slots=True)
class Snapshot:
    nbytes: int = SNAPSHOT_BYTES


@dataclass(eq=False)
class Conversation:
    """One that goes on: what was said, and where its turns end."""

    key: StateKey
    tokens: TokenRun
    turns: tuple[int, ...]


PASSES_MS: list[float] = []
"""Of the garbage collector."""


def _note_pass(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        PASSES_MS.append(-_now_ms())
    else:
        PASSES_MS[-1] += _now_ms()


def _now_ms() -> float:
    return time.thread_time_ns() / 1e6


@dataclass
class Times:
    """Milliseconds of one operation."""

    values: list[float] = field(default_factory=list)

    def add(self, call: Callable[[], object]) -> object:
        begin_ms, passes_ms = _now_ms(), sum(PASSES_MS)
        try:
            return call()
        finally:
            self.values.append(_now_ms() - begin_ms - (sum(PASSES_MS) - passes_ms))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def worst(self) -> float:
        return max(self.values)

    def __str__(self) -> str:
        p99 = statistics.quantiles(self.values, n=100, method="inclusive")[98]
        return f"{self.median:8.3f} {p99:8.3f} {self.worst:8.3f}"


class Chats:
    """Conversations as clients have them: some new, most of them go on."""

    def __init__(self, entries: int) -> None:
        self._rng = random.Random(entries)
        # A system prompt is one entry, however long it is.
        lengths = [400, 150, 60] if entries > 1000 else [60, 60, 60]
        self._systems = [self._say(length) for length in lengths]
        self._open: list[Conversation] = []
        self._most = max(entries // 12, 4)

    def next(self) -> Conversation:
        """Return a conversation whose next turn has come, or a copy of an earlier part of
        one, which goes on differently."""
        rng, draw = self._rng, self._rng.random()
        if not self._open or draw < 0.15:
            system = rng.choice(self._systems)
            chat = Conversation(rng.choice(KEYS), system, (len(system),))
            self._open.append(chat)
        else:
            chat = rng.choice(self._open)
            if draw < 0.25 and len(chat.turns) > 1:
                end = rng.choice(chat.turns[:-1])
                turns = tuple(turn for turn in chat.turns if turn <= end)
                chat = Conversation(chat.key, chat.tokens[:end], turns)
                self._open.append(chat)
        if len(chat.turns) > 12:
            self._open.remove(chat)
        if len(self._open) > self._most:
            self._open.pop(rng.randrange(len(self._open)))
        self._go_on(chat)
        return chat

    def answer(self, chat: Conversation) -> None:
        """Say something in reply."""
        self._go_on(chat)
        chat.turns = (*chat.turns, len(chat.tokens))

    def _go_on(self, chat: Conversation) -> None:
        said = self._say(self._rng.randrange(8, 30))
        chat.tokens = np.concatenate([chat.tokens, said])

    def _say(self, tokens: int) -> TokenRun:
        return as_run([self._rng.randrange(50_000) for _ in range(tokens)])


class Bench:
    """A bank that is used until it is full, and then measured."""

    def __init__(self, entries: int) -> None:
        self.chats = Chats(entries)
        self.bank = SessionBank(entries * ENTRY_TOKENS)
        self.times: dict[str, Times] = {}
        self.refused = 0
        while self.bank.evictions < entries // 10:
            self.serve()
        for _ in range(2):
            self.bank.limit(self.bank.nbytes)
            self.measure(entries // 2)
        self.bank.limit(self.bank.nbytes)
        self.times = {}

    def measure(self, turns: int) -> None:
        """Serve more turns, and see what else is asked of a bank."""
        for turn in range(turns):
            self.serve()
            if turn % 10 == 0:
                self._lower_the_limit()
        self.bank.check()

    def serve(self) -> None:
        """Let a request do what it does with the bank."""
        chat, bank = self.chats.next(), self.bank
        lookup = bank.look_up(chat.key, chat.tokens)
        self._time("match", lambda: lookup.match)
        size = Buffer(len(chat.tokens) + 40).nbytes
        try:
            lease = self._time("acquire", lambda: lookup.acquire(size))
        except KVBudgetError:
            self.refused += 1
            return
        assert isinstance(lease, Lease)
        buffer = lease.borrowed or Buffer()
        assert isinstance(buffer, Buffer)
        buffer.tokens = max(buffer.tokens, len(chat.tokens))
        lease.run_in(buffer, size)
        self._store(chat, buffer)
        self.chats.answer(chat)
        buffer.tokens = len(chat.tokens)
        self._time(
            "reserve", lambda: lease.reserve(buffer.nbytes + STEP_TOKENS * ROW_BYTES)
        )
        self._store(chat, buffer)
        self._time("release", lease.release)

    def _store(self, chat: Conversation, buffer: Buffer) -> None:
        tokens = chat.tokens
        snapshots = {} if chat.key.any_prefix else {len(tokens): Snapshot()}
        self._time(
            "store",
            lambda: self.bank.store(chat.key, tokens, buffer.rows, snapshots, whole=True),
        )

    def _lower_the_limit(self) -> None:
        """By a prompt of 200 tokens; the turns after it fill the bank again."""
        limit, lower = self.bank.max_bytes, self.bank.nbytes - 200 * ROW_BYTES
        assert limit is not None
        self._time("limit", lambda: self.bank.limit(lower))
        self.bank.limit(limit)

    def _time(self, name: str, call: Callable[[], object]) -> object:
        times, evictions = Times(), self.bank.evictions
        try:
            return times.add(call)
        finally:
            name += " that evicts" if self.bank.evictions > evictions else ""
            self.times.setdefault(name, Times()).values += times.values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=3000, help="measured for each size")
    turns = parser.parse_args().turns
    gc.callbacks.append(_note_pass)
    medians: dict[str, list[float]] = {}
    problems = []
    for size in SIZES:
        bench = Bench(size)
        PASSES_MS.clear()
        bench.measure(turns)
        bank = bench.bank
        print(
            f"\n{bank.entries} entries, {bank.tokens} of {bank.max_kv_size} tokens, "
            f"{bank.nbytes} of {bank.max_bytes} bytes, {bank.evictions} evictions, "
            f"{bank.thinned} thinned, {bench.refused} refused"
        )
        print(f"{'':22}{'median':>8} {'p99':>8} {'worst':>8}  ms")
        print(
            f"{'collector':22}{'':18}{max(PASSES_MS, default=0):8.3f}  ({len(PASSES_MS)})"
        )
        for name, times in sorted(bench.times.items()):
            print(f"{name:22}{times}  ({len(times.values)})")
            if len(times.values) >= LEAST_SAMPLES:
                medians.setdefault(name, []).append(times.median)
            if times.median > MEDIAN_MS or times.worst > WORST_MS:
                problems.append(f"{name} of {size} entries is too slow")
    for name, values in medians.items():
        small, large = values[0], values[-1]
        if large > max(FLAT * small, FLAT_FROM_MS):
            problems.append(
                f"{name} takes {large / small:.1f} times as long in the largest"
            )
    print("\n" + ("\n".join(problems) or "All limits hold."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
