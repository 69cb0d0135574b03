"""Moves state between the SessionBank and the disk tier, one piece at a time.

The tier's own threads read and write files; what must happen on the engine thread is
copying between MLX and host memory, and that is done here, a bounded piece between two
iterations. Prompts are restored from disk only where reading is expected to be faster
than computing.
"""

from __future__ import annotations

import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from mlx_lm.models.cache import make_prompt_cache

from mtplx.models import Model
from mtplx.models.cache import KVRows, LayerSnapshot
from mtplx.models.host import (
    rows_from_host,
    rows_to_host,
    snapshot_from_host,
    snapshot_to_host,
)
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier, Fetched, FetchedPiece, Piece
from mtplx.session.state import TokenRun
from mtplx.session.tree import as_run
from mtplx.types import StateKey

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 1024**2
"""Most bytes of a piece. Copying one takes about 10 ms; streams wait for that."""

LEAST_TOKENS = 64
"""Fewer tokens are neither written to disk nor worth a fetch."""


@dataclass
class _Outgoing:
    """A prompt whose state is to be written."""

    key: StateKey
    tokens: TokenRun
    pieces: deque[Piece] | None = None


@dataclass
class _Incoming:
    """A fetch that has come back, and what of it is not in the bank yet."""

    request_id: str
    key: StateKey
    tokens: TokenRun
    fetched: Fetched
    pieces: deque[FetchedPiece] = field(default_factory=deque)


class DiskWork:
    """What there is to copy.

    Args:
        model, bank, tier: Where state comes from and goes to.
        wake: Called on another thread when a fetch has come back.
        compute_seconds: What computing ``[start, end)`` of a prompt takes.
    """

    def __init__(
        self,
        model: Model,
        bank: SessionBank,
        tier: DiskTier,
        wake: Callable[[], None],
        compute_seconds: Callable[[int, int], float],
    ) -> None:
        self._model = model
        self._bank = bank
        self._tier = tier
        self._wake = wake
        self._compute_seconds = compute_seconds
        self._back: queue.SimpleQueue[_Incoming] = queue.SimpleQueue()
        self._incoming: deque[_Incoming] = deque()
        self._outgoing: deque[_Outgoing] = deque()
        row_bytes = max(model.state_size.row_bytes, 1)
        self._piece_tokens = max(PIECE_BYTES // row_bytes, 1)

    @property
    def idle(self) -> bool:
        """There is nothing to copy."""
        return self._back.empty() and not self._incoming and not self._outgoing

    def fetch(
        self, request_id: str, key: StateKey, tokens: TokenRun, in_memory: int
    ) -> bool:
        """Begin to read what the disk has beyond memory; False where that is not worth it.

        Args:
            request_id: Named by ``step`` once its state is in the bank.
            key, tokens: Of the prompt.
            in_memory: Tokens that the bank can restore.
        """
        if not self.on_disk(key, tokens, in_memory)[0]:
            return False

        def back(fetched: Fetched) -> None:
            self._back.put(_Incoming(request_id, key, tokens, fetched))
            self._wake()

        self._tier.fetch(key, tokens, in_memory, back)
        return True

    def on_disk(self, key: StateKey, tokens: TokenRun, in_memory: int) -> tuple[int, float]:
        """Return how many tokens more than ``in_memory`` the disk would give, and the
        seconds that reading them would take; zeros where they would be computed."""
        more = self._tier.match(key, tokens) - in_memory
        if more < LEAST_TOKENS:
            return 0, 0.0
        seconds = self._tier.restore_seconds(key, tokens, in_memory)
        if seconds >= self._compute_seconds(in_memory, in_memory + more):
            return 0, 0.0
        return more, seconds

    def keep(self, key: StateKey, token_ids: Sequence[int]) -> None:
        """Write the state of a prompt, as far as the bank has it by then."""
        if len(token_ids) >= LEAST_TOKENS:
            self._outgoing.append(_Outgoing(key, as_run(token_ids)))

    def step(self) -> tuple[list[str], list[str]]:
        """Copy one piece, those that a request waits for first.

        Returns:
            The requests whose state is as complete as it will be, and those of them that
            got any.
        """
        while not self._back.empty():
            incoming = self._back.get()
            incoming.pieces.extend(incoming.fetched.pieces)
            self._incoming.append(incoming)
        if self._incoming:
            return self._take_in(self._incoming[0])
        if self._outgoing:
            self._give_out(self._outgoing[0])
        return [], []

    def finish(self) -> None:
        """Hand all that is left to the tier."""
        while self._outgoing:
            self._give_out(self._outgoing[0])

    def _take_in(self, incoming: _Incoming) -> tuple[list[str], list[str]]:
        if incoming.pieces:
            try:
                self._store(incoming, incoming.pieces.popleft())
            except Exception:
                # What is missing is computed.
                logger.exception("State from the disk could not be used")
                incoming.pieces.clear()
        if incoming.pieces:
            return [], []
        self._incoming.popleft()
        got = incoming.fetched.length > incoming.fetched.start
        return [incoming.request_id], [incoming.request_id] if got else []

    def _store(self, incoming: _Incoming, piece: FetchedPiece) -> None:
        rows = rows_from_host(piece.rows, make_prompt_cache(self._model.network))
        snapshots = {
            index: snapshot_from_host(state, make_prompt_cache(self._model.network))
            for index, state in piece.snapshots.items()
        }
        self._bank.store(
            incoming.key,
            incoming.tokens[: piece.until],
            lambda start, end: rows.slice(start - piece.start, end - piece.start),
            snapshots,
            more_follows=bool(incoming.pieces),
        )

    def _give_out(self, outgoing: _Outgoing) -> None:
        key, tokens = outgoing.key, outgoing.tokens
        snapshots = self._bank.snapshots(key, tokens)
        if outgoing.pieces is None:
            missing = self._tier.missing(key, tokens, snapshots, self._piece_tokens)
            outgoing.pieces = deque(missing)
        if outgoing.pieces:
            piece = outgoing.pieces.popleft()
            views = self._bank.read(key, tokens, piece.start, piece.end)
            taken = {i: snapshots[i] for i in piece.snapshots if i in snapshots}
            if views is None:
                # Evicted meanwhile; what comes behind it could not be reached.
                outgoing.pieces.clear()
            else:
                self._tier.put(
                    key,
                    tokens,
                    piece,
                    rows_to_host(cast(list[KVRows], views)) if views else None,
                    {i: snapshot_to_host(cast(LayerSnapshot, s)) for i, s in taken.items()},
                )
        if not outgoing.pieces:
            self._outgoing.popleft()
