"""The thread that reads: files in order, each verified before it is used.

A file that is not what it should be ends the run there and is set aside; the caller
gets what was good before it and computes the rest. The speed of past reads, checksums
included, says what the next will take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Thread
from time import perf_counter

from mtplx.session.disk.catalog import Catalog
from mtplx.session.disk.folder import Folder
from mtplx.session.disk.forest import Segment, Trail
from mtplx.session.disk.format import ROWS, BadFileError, decode
from mtplx.session.disk.values import Fetched, FetchedPiece
from mtplx.session.disk.writer import Writer
from mtplx.types import HostState

logger = logging.getLogger(__name__)

FIRST_GUESS_BYTES_S = 500e6
"""Speed assumed before anything was read: a plain SSD, and the checksums."""
FIRST_GUESS_BYTES = 16e6
"""How many bytes that guess weighs."""
TELLING_BYTES = 1e6
"""Reads below this say what opening a file costs, not how fast bytes come."""
EARLIER_WEIGHT = 0.8
"""Weight of all earlier reads when one more is added."""

OnDone = Callable[[Fetched], None]


@dataclass(frozen=True)
class _Job:
    start: int
    length: int
    trail: Trail
    by_snapshot: bool
    on_done: OnDone


class Reader:
    """Reads what the catalog names."""

    def __init__(self, folder: Folder, catalog: Catalog, writer: Writer) -> None:
        self.hits = 0
        self.misses = 0
        self.restored_tokens = 0
        self.bytes_read = 0
        self._folder = folder
        self._catalog = catalog
        self._writer = writer
        self._rate = FIRST_GUESS_BYTES, FIRST_GUESS_BYTES / FIRST_GUESS_BYTES_S
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._thread = Thread(target=self._run, name="kv-disk-reader", daemon=True)
        self._thread.start()

    @property
    def bytes_s(self) -> float:
        """Bytes read and verified in a second, as measured."""
        nbytes, seconds = self._rate
        return nbytes / seconds

    def fetch(
        self, start: int, length: int, trail: Trail, by_snapshot: bool, on_done: OnDone
    ) -> None:
        """Read the files of a trail, and release it; ``on_done`` hears of it once."""
        self._jobs.put(_Job(start, length, trail, by_snapshot, on_done))

    def close(self) -> None:
        """Stop. Fetches that have not begun end with nothing."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._serve(job)
            del job  # What it was for may be large; the next one may be long in coming.

    def _serve(self, job: _Job) -> None:
        began_s, before = perf_counter(), self.bytes_read
        fetched = Fetched(job.start, job.start)
        try:
            if not self._closed:
                fetched = self._read(job)
        except Exception:
            # Whoever waits must hear of the end; the prompt is computed instead.
            logger.exception("KV state could not be read.")
        finally:
            self._catalog.release(job.trail)
        nbytes = self.bytes_read - before
        fetched = replace(fetched, seconds=perf_counter() - began_s, nbytes=nbytes)
        self._note(job, fetched)
        try:
            job.on_done(fetched)
        except Exception:
            logger.exception("The receiver of KV state failed.")

    def _read(self, job: _Job) -> Fetched:
        pieces: list[FetchedPiece] = []
        for segment, until in job.trail:
            rows = self._file(segment, ROWS)
            if rows is None:
                break
            pieces.append(FetchedPiece(segment.start, segment.end, until, rows, {}))
        if job.by_snapshot:
            pieces = self._cut_at_snapshot(job, pieces)
        length = pieces[-1].until if pieces else job.start
        return Fetched(job.start, length, tuple(pieces))

    def _cut_at_snapshot(self, job: _Job, pieces: list[FetchedPiece]) -> list[FetchedPiece]:
        """End the pieces at the last good snapshot among them, which goes with them."""
        for number, piece in reversed([*enumerate(pieces)]):
            segment, _ = job.trail[number]
            for index in self._catalog.snapshots(segment):
                if job.start < index <= piece.until:
                    snapshot = self._file(segment, index)
                    if snapshot is not None:
                        held: Mapping[int, HostState] = {index: snapshot}
                        last = replace(piece, until=index, snapshots=held)
                        return [*pieces[:number], last]
        return []

    def _file(self, segment: Segment, index: int) -> HostState | None:
        entry = self._catalog.entry(segment, index)
        if entry is None:
            return None
        try:
            data = self._folder.file(entry).read_bytes()
            self.bytes_read += len(data)
            return decode(entry, data)
        except OSError as error:
            reason = f"it cannot be read ({error.strerror})"
        except BadFileError as error:
            reason = str(error)
        self._writer.set_aside(segment, entry, reason)
        return None

    def _note(self, job: _Job, fetched: Fetched) -> None:
        restored = fetched.length - fetched.start
        if restored:
            self.hits += 1
            self.restored_tokens += restored
            self._catalog.used(job.trail[: len(fetched.pieces)])
        else:
            self.misses += 1
        if fetched.nbytes >= TELLING_BYTES:
            nbytes, seconds = self._rate
            self._rate = (
                EARLIER_WEIGHT * nbytes + fetched.nbytes,
                EARLIER_WEIGHT * seconds + fetched.seconds,
            )
