"""The disk tier: what the engine asks of KV state on disk.

It decides nothing about when to store or restore; the caller compares
``restore_seconds`` with what computing would take. State comes and goes as
``HostState``; the folder is written by one thread of its own and read by another, and
no method here waits for the disk but the constructor, ``flush`` and ``close``. All
others belong to the engine thread, ``stats`` to any.

A run of tokens is written once, however many prompts share it; ``catalog.py`` says how.
Losing state costs computing it again and nothing else, so trouble with the disk is
logged and counted and never raised; only a folder that cannot be used at all is an
error, at start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from mtplx.session.disk.folder import Folder
from mtplx.session.disk.format import ROWS
from mtplx.session.disk.opening import open_folder
from mtplx.session.disk.reader import OnDone, Reader
from mtplx.session.disk.values import Fetched, Piece
from mtplx.session.disk.writer import Writer
from mtplx.session.state import TokenIds
from mtplx.session.tree import as_run
from mtplx.types import DiskStats, HostState, StateKey

QUEUE_BYTES = 256 * 1024**2
CLOSE_S = 5.0


class DiskTier:
    """Keeps KV state in a folder, across restarts.

    Args:
        folder: Made where it does not exist; one process at a time.
        max_bytes: Most bytes in the folder, whatever they are of.
        daily_write_bytes: Most bytes of state written in 24 hours, restarts or not.
        queue_bytes: Most bytes of state that wait to be written; a piece larger than
            that is never taken.
        clock: Gives the Unix time.

    Raises:
        ConfigError: The folder cannot be written to, or another process has it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        daily_write_bytes: int,
        queue_bytes: int = QUEUE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = Folder(folder)
        self._folder.claim()
        try:
            opened = open_folder(self._folder, clock)
        except BaseException:
            self._folder.release()
            raise
        self._orphans = opened.orphans
        self._catalog = opened.catalog
        self._writer = Writer(
            self._folder,
            opened,
            max_bytes=max_bytes,
            daily_bytes=daily_write_bytes,
            queue_bytes=queue_bytes,
            clock=clock,
        )
        self._reader = Reader(self._folder, self._catalog, self._writer)
        self._closed = False

    def match(self, key: StateKey, token_ids: TokenIds) -> int:
        """Return how many tokens the disk alone can restore.

        The same rules as in memory: never the whole prompt, at any token where the
        key allows it, else at a snapshot. Pass the token ids as an int32 array where
        the prompt is long; a sequence is converted in each call.
        """
        return self._catalog.match(key, as_run(token_ids))

    def missing(
        self,
        key: StateKey,
        token_ids: TokenIds,
        snapshots: Collection[int],
        max_piece_tokens: int,
    ) -> list[Piece]:
        """Return what is not on disk, nor on its way, of the state of a prompt.

        Args:
            key: Of the model that computed the state.
            token_ids: The tokens whose state is complete.
            snapshots: Indices in ``(0, len(token_ids)]`` with a snapshot to keep. Where
                the key needs them, nothing behind the last one is worth storing.
            max_piece_tokens: Most tokens of a piece.

        Returns:
            Pieces in order. Those without rows come first; the others follow one
            another without a gap.
        """
        return self._catalog.missing(key, as_run(token_ids), snapshots, max_piece_tokens)

    def put(
        self,
        key: StateKey,
        token_ids: TokenIds,
        piece: Piece,
        rows: HostState | None,
        snapshots: Mapping[int, HostState],
    ) -> bool:
        """Hand a piece that ``missing`` named to the writer.

        Args:
            key: Of the model that computed the state.
            token_ids: At least the tokens up to the end of the piece.
            piece: What this is; put pieces in the order they were named.
            rows: Of its tokens, not to be written to any more. None where the piece is
                a snapshot alone, or the model keeps no rows; a fetch gives the latter
                back as a state without arrays.
            snapshots: By index, all or some of those the piece names.

        Returns:
            False where it is dropped; ``stats().dropped`` says why.
        """
        assert rows is None or piece.start < piece.end
        assert set(snapshots) <= set(piece.snapshots)
        states = dict(snapshots)
        if piece.start < piece.end:
            states[ROWS] = rows or HostState({}, {})
        return self._writer.put(key, as_run(token_ids), piece, states)

    def fetch(
        self, key: StateKey, token_ids: TokenIds, start: int, on_done: OnDone
    ) -> None:
        """Read what follows the first ``start`` tokens, as far as ``match`` says.

        ``on_done`` is called exactly once, on the reader's thread, also where nothing
        could be read.
        """
        if self._closed:
            on_done(Fetched(start, start))
            return
        length, path = self._catalog.plan(key, as_run(token_ids), start)
        self._reader.fetch(start, length, path, not key.any_prefix, on_done)

    def restore_seconds(self, key: StateKey, token_ids: TokenIds, start: int) -> float:
        """Return what ``fetch`` would take, by the speed of those before.

        Bringing the arrays to where the model computes is not in it.
        """
        nbytes = self._catalog.nbytes_to_read(key, as_run(token_ids), start)
        return nbytes / self._reader.bytes_s

    def stats(self) -> DiskStats:
        """Return the state of things."""
        writer, reader, catalog = self._writer, self._reader, self._catalog
        return DiskStats(
            bytes=writer.folder_bytes,
            files=catalog.files,
            segments=catalog.segments,
            queue_bytes=writer.queue_bytes,
            hits=reader.hits,
            misses=reader.misses,
            restored_tokens=reader.restored_tokens,
            bytes_read=reader.bytes_read,
            bytes_written=writer.bytes_written,
            bytes_written_today=writer.bytes_today,
            dropped=dict(writer.dropped),
            quarantined=writer.quarantined,
            evicted=writer.evicted,
            orphans=self._orphans,
        )

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was put is written; False where time ran out."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is queued, as far as time allows, and give the folder back."""
        if not self._closed:
            self._closed = True
            self._reader.close()
            self._writer.close(timeout_s)
            self._folder.release()

    def check(self) -> None:
        """Verify the invariants of the catalog.

        Raises:
            AssertionError: One of them does not hold.
        """
        self._catalog.check()
