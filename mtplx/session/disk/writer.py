"""The thread that writes: pieces to disk, evictions, what the reader found bad.

It alone changes the folder and the index once they are open. Work comes through a
queue that is bounded in bytes; what cannot be written is dropped, counted by reason and
said once, since losing it only costs computing it again. A piece becomes visible in
this order: its files are whole and on the disk, its rows are committed, the catalog
offers it. At a kill between any two of these the folder has at most a file that nobody
speaks of. A removal goes the other way round.

``put`` and ``set_aside`` look at the catalog and queue under one lock, so that work is
queued in the order in which the catalog changed.
"""

from __future__ import annotations

import errno
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Condition, Thread

from mtplx.session.disk.folder import Folder
from mtplx.session.disk.forest import Removed, Segment
from mtplx.session.disk.format import ROWS, Entry, SegmentRow, encode
from mtplx.session.disk.index import HOUR_S, INDEX_ERRORS, PAGE_BYTES, recent
from mtplx.session.disk.opening import Opened, warn_bad
from mtplx.session.disk.room import Room
from mtplx.session.disk.values import Piece
from mtplx.session.state import TokenRun
from mtplx.types import HostState, StateKey

logger = logging.getLogger(__name__)

PAUSE_S = 30.0
"""After a write that failed, for how long none is tried."""

_MESSAGES = {
    "queue_full": "the disk is slower than the state comes",
    "daily_budget": "the bytes allowed for 24 hours are spent (kv_disk_daily_bytes)",
    "disk_full": "the disk is full; writing is tried again later",
    "write_error": "the disk cannot be written to; writing is tried again later",
    "too_large": "it does not fit the folder (kv_disk_bytes)",
}


@dataclass(frozen=True)
class _Write:
    key: StateKey
    segment: Segment
    states: Mapping[int, HostState]
    nbytes: int


@dataclass(frozen=True)
class _SetAside:
    bad: Entry
    removed: Removed


class Writer:
    """Owns the folder and the index after they have been opened.

    Args:
        max_bytes: Most bytes in the folder.
        daily_bytes: Most bytes of state written in 24 hours.
        queue_bytes: Most bytes of state that wait.
        clock: Gives the Unix time.
    """

    def __init__(
        self,
        folder: Folder,
        opened: Opened,
        *,
        max_bytes: int,
        daily_bytes: int,
        queue_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self.dropped: Counter[str] = Counter()
        self.bytes_written = 0
        self.quarantined = opened.quarantined
        self.queue_bytes = 0
        self._folder = folder
        self._index = opened.index
        self._catalog = opened.catalog
        self._room = Room(folder, opened.index, opened.catalog, max_bytes)
        self._daily_bytes = daily_bytes
        self._max_queue_bytes = queue_bytes
        self._clock = clock
        self._written = opened.written
        self._pause: tuple[float, str] | None = None
        self._jobs: deque[_Write | _SetAside] = deque()
        self._busy = False
        self._closing = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="kv-disk-writer", daemon=True)
        self._thread.start()

    # -- any thread -------------------------------------------------------------

    def put(
        self,
        key: StateKey,
        tokens: TokenRun,
        piece: Piece,
        states: Mapping[int, HostState],
    ) -> bool:
        """Queue a piece; False where it is dropped instead."""
        nbytes = sum(state.nbytes for state in states.values())
        with self._changed:
            reason = self._refusal(nbytes)
            if reason is None:
                indices = states.keys() - {ROWS}
                segment = self._catalog.queue(key, tokens, piece, indices)
                if segment is not None:
                    self._jobs.append(_Write(key, segment, states, nbytes))
                    self.queue_bytes += nbytes
                    self._changed.notify_all()
                    return True
                reason = "stale"
        self._drop(reason)
        return False

    def set_aside(self, segment: Segment, entry: Entry, reason: str) -> None:
        """Take a bad file out of use, with all that cannot be restored without it."""
        with self._changed:
            removed = self._catalog.take_out(segment, entry)
            if removed is None:
                return
            self.quarantined += 1
            self._jobs.append(_SetAside(entry, removed))
            self._changed.notify_all()
        warn_bad(self._folder, entry, reason)

    @property
    def bytes_today(self) -> int:
        """Bytes of state written in the last 24 hours."""
        return sum(recent(self._written, self._clock()).values())

    @property
    def folder_bytes(self) -> int:
        """Bytes of all that is in the folder."""
        return self._room.nbytes

    @property
    def evicted(self) -> int:
        """Segments removed to make room."""
        return self._room.evicted

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until nothing is left to do; False where time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._jobs and not self._busy, timeout_s
            )

    def close(self, timeout_s: float) -> None:
        """Write what is queued, as far as time allows, and let go of the index."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        if not self.flush(timeout_s):
            with self._changed:
                self.dropped["closed"] += sum(isinstance(j, _Write) for j in self._jobs)
                self._jobs.clear()
                self.queue_bytes = 0
        self._thread.join()
        try:
            self._index.touch(self._catalog.take_touched())
        except INDEX_ERRORS as error:
            logger.warning("The last uses of KV state on disk were not noted: %s", error)
        self._index.close()

    def _refusal(self, nbytes: int) -> str | None:
        if self._closing:
            return "closed"
        if (paused := self._paused()) is not None:
            return paused
        if self.bytes_today + self.queue_bytes + nbytes > self._daily_bytes:
            return "daily_budget"
        if self.queue_bytes + nbytes > self._max_queue_bytes:
            return "queue_full"
        return None

    def _paused(self) -> str | None:
        """Return why nothing is written for now."""
        pause = self._pause
        return pause[1] if pause is not None and self._clock() < pause[0] else None

    def _drop(self, reason: str) -> None:
        with self._changed:
            self.dropped[reason] += 1
            first = self.dropped[reason] == 1
        if first and reason in _MESSAGES:
            logger.warning(
                "KV state is not written to %s: %s. The server goes on without it.",
                self._folder.path,
                _MESSAGES[reason],
            )

    # -- its own thread ---------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._busy = True
            try:
                if isinstance(job, _Write):
                    self._write(job)
                else:
                    self._folder.set_aside(self._folder.file(job.bad))
                    self._room.delete(job.removed, [job.bad])
            finally:
                del job  # It holds state; the next one may be long in coming.
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _write(self, job: _Write) -> None:
        segment, written = job.segment, list[Entry]()
        try:
            reason = self._try(job, written)
        except (OSError, *INDEX_ERRORS) as error:
            logger.debug("writing KV state failed: %s", error)
            reason = "disk_full" if _is_full(error) else "write_error"
            self._pause = self._clock() + PAUSE_S, reason
        except Exception:
            # Losing one piece is better than writing nothing from here on.
            logger.exception("KV state could not be written.")
            reason = "write_error"
        with self._changed:
            self.queue_bytes -= job.nbytes
        if reason is not None:
            self._folder.remove(written)
            self._catalog.not_stored(segment, job.states.keys())
            self._drop(reason)
        elif not self._catalog.stored(segment, written):
            # What it continues was found bad meanwhile.
            self._room.delete(Removed([segment.id], written))
            self._drop("stale")

    def _try(self, job: _Write, written: list[Entry]) -> str | None:
        """Write the files of a piece and commit them; return why not."""
        segment = job.segment
        if (paused := self._paused()) is not None:
            return paused
        parent = self._catalog.parent(segment)
        if parent is None:
            return "stale"
        files = [encode(segment.id, index, state) for index, state in job.states.items()]
        nbytes = sum(entry.nbytes for entry, _ in files)
        if self.bytes_today + nbytes > self._daily_bytes:
            return "daily_budget"
        row_bytes = segment.tokens.nbytes + len(files) * PAGE_BYTES
        if not self._room.make(nbytes + row_bytes):
            return "too_large"
        for entry, data in files:
            self._folder.write(entry, data)
            written.append(entry)
            self._account(entry.nbytes)
        row = SegmentRow(
            segment.id, parent, segment.start, segment.tokens, 1, segment.last_used_s
        )
        self._index.touch(self._catalog.take_touched())
        self._index.store(
            job.key, row if ROWS in job.states else None, written, self._written
        )
        if self._pause is not None:
            self._pause = None
            logger.info("KV state is written to %s again.", self._folder.path)
        return None

    def _account(self, nbytes: int) -> None:
        now_s = self._clock()
        hours = recent(self._written, now_s)
        hour = int(now_s // HOUR_S)
        hours[hour] = hours.get(hour, 0) + nbytes
        # A new dict each time: other threads read the old one.
        self._written = hours
        self.bytes_written += nbytes


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
