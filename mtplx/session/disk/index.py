"""The index on disk: which files there are, whose they are, and what was written when.

SQLite in WAL mode with ``synchronous=NORMAL``: a process that dies loses nothing that
was committed, and a machine that loses power may lose the last commits but not the
database. Neither is a danger here. A file is complete and on the disk before its row
is committed, and its row is gone before the file is deleted, so that a lost commit
leaves a file without a row, or a row without a file; the next open removes both. And no
row is believed: the name of a segment is a hash of its tokens, and each file has its
checksum.

The thread that opened the index, then the writer thread, owns an ``Index``; a command
line beside a server has a read-only one of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mtplx.errors import ConfigError
from mtplx.session.disk.format import FORMAT_VERSION, Entry, SegmentRow, root_id
from mtplx.types import StateKey

HOUR_S = 3600
HOURS_A_DAY = 24
WAL_PAGES = 64
PAGE_BYTES = 4096
WAL_BYTES = WAL_PAGES * PAGE_BYTES
"""Size the log reaches before it is folded into the database."""

BUSY_S = 1.0
"""How long to wait for somebody who looks into the database."""

SCHEMA = """
CREATE TABLE roots (id BLOB PRIMARY KEY, fingerprint TEXT NOT NULL) STRICT;
CREATE TABLE segments (
    id BLOB PRIMARY KEY, parent BLOB NOT NULL, start INTEGER NOT NULL,
    tokens BLOB NOT NULL, uses INTEGER NOT NULL, last_used_s REAL NOT NULL) STRICT;
CREATE TABLE files (
    segment BLOB NOT NULL, "index" INTEGER NOT NULL, nbytes INTEGER NOT NULL,
    checksum BLOB NOT NULL, PRIMARY KEY (segment, "index")) STRICT;
CREATE TABLE written (hour INTEGER PRIMARY KEY, nbytes INTEGER NOT NULL) STRICT;
"""

INDEX_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises: where it quotes damaged text, its message cannot be decoded."""

_NOT_ITS_FAULT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
}


class BadIndexError(Exception):
    """The database cannot be used. The message is the reason, for the log."""


class OtherVersionError(Exception):
    """The database is of another format version; the message names it."""


class Index:
    """An open index.

    Args:
        path: The database; a new one is made where there is none.
        read_only: Look on while somebody else owns it.

    Raises:
        BadIndexError: It is corrupt.
        OtherVersionError: Another version of this program wrote it.
        ConfigError: It cannot be opened for a reason outside it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        new = not path.exists()
        try:
            mode = "ro" if read_only else "rwc"
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={mode}",
                uri=True,
                timeout=BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._prepare(new and not read_only, read_only)
            except BaseException:
                self._db.close()
                raise
        except INDEX_ERRORS as error:
            raise _explained(error, path) from None

    def _prepare(self, new: bool, read_only: bool) -> None:
        if new:
            self._db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            # Deleted rows give their room back.
            self._db.execute("PRAGMA auto_vacuum = FULL")
            version = f"PRAGMA user_version = {FORMAT_VERSION};"
            self._db.executescript(f"BEGIN; {SCHEMA} {version} COMMIT;")
            # Whatever happens to the log later, the database is one of this version.
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT_VERSION:
            raise OtherVersionError(f"version {version}")
        if not read_only:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            self._db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        (found,) = self._db.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise BadIndexError(str(found))

    # -- reading ----------------------------------------------------------------

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Let all reads inside see the same state."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def roots(self) -> dict[bytes, str]:
        """Return the fingerprint of each root."""
        return dict(self._read("SELECT id, fingerprint FROM roots"))

    def segments(self) -> list[SegmentRow]:
        """Return the segments."""
        query = "SELECT id, parent, start, tokens, uses, last_used_s FROM segments"
        return [
            SegmentRow(id, parent, start, _tokens(run), uses, last_used_s)
            for id, parent, start, run, uses, last_used_s in self._read(query)
        ]

    def entries(self) -> list[Entry]:
        """Return the files."""
        query = 'SELECT segment, "index", nbytes, checksum FROM files'
        return [Entry(*row) for row in self._read(query)]

    def written(self) -> dict[int, int]:
        """Return the bytes written in each hour since 1970 that is remembered."""
        return dict(self._read("SELECT hour, nbytes FROM written"))

    def nbytes(self) -> int:
        """Return the bytes of the database and its log."""
        return sum(index_sizes(self.path))

    def room_bytes(self) -> int:
        """Return the bytes it may take before its log is folded in again."""
        database, log, shared = index_sizes(self.path)
        return database + max(log, WAL_BYTES) + shared

    def _read(self, query: str) -> list[tuple]:  # type: ignore[type-arg]
        try:
            return self._db.execute(query).fetchall()
        except INDEX_ERRORS as error:
            raise _explained(error, self.path) from None

    # -- writing; one of INDEX_ERRORS leaves everything as it was -----------------

    def store(
        self,
        key: StateKey,
        segment: SegmentRow | None,
        entries: Iterable[Entry],
        written: Mapping[int, int],
    ) -> None:
        """Note files that are complete.

        Args:
            key: Of the model whose state it is.
            segment: The segment, where it is new.
            entries: Its files.
            written: The whole account of bytes by hour.
        """
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            root = root_id(key), key.fingerprint
            self._db.execute("INSERT OR IGNORE INTO roots VALUES (?, ?)", root)
            if segment is not None:
                self._db.execute(
                    "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?)",
                    (
                        segment.id,
                        segment.parent,
                        segment.start,
                        segment.tokens.astype("<i4").tobytes(),
                        segment.uses,
                        segment.last_used_s,
                    ),
                )
            self._db.executemany(
                "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)",
                [(e.segment, e.index, e.nbytes, e.checksum) for e in entries],
            )
            self._db.execute("DELETE FROM written")
            self._db.executemany("INSERT INTO written VALUES (?, ?)", written.items())

    def remove(self, segments: Iterable[bytes], entries: Iterable[Entry]) -> None:
        """Forget segments with all their files, and single files."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            for id in segments:
                self._db.execute("DELETE FROM segments WHERE id = ?", (id,))
                self._db.execute("DELETE FROM files WHERE segment = ?", (id,))
            self._db.executemany(
                'DELETE FROM files WHERE segment = ? AND "index" = ?',
                [(entry.segment, entry.index) for entry in entries],
            )

    def touch(self, used: Sequence[tuple[bytes, int, float]]) -> None:
        """Note id, uses and last use of segments."""
        if not used:
            return
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "UPDATE segments SET uses = ?, last_used_s = ? WHERE id = ?",
                [(uses, last_used_s, id) for id, uses, last_used_s in used],
            )

    def close(self) -> None:
        """Fold the log in and close."""
        self._db.close()


def index_files(path: Path) -> tuple[Path, ...]:
    """Return the files SQLite keeps for a database."""
    return tuple(path.with_name(path.name + end) for end in ("", "-wal", "-shm"))


def recent(written: Mapping[int, int], now_s: float) -> dict[int, int]:
    """Return the part of an account by hour that is of the last 24 hours."""
    hour = int(now_s // HOUR_S)
    return {h: n for h, n in written.items() if 0 <= hour - h <= HOURS_A_DAY}


def index_sizes(path: Path) -> list[int]:
    """Return the bytes of each of those files, 0 where it does not exist."""
    sizes = []
    for file in index_files(path):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:
            sizes.append(0)
    return sizes


def _tokens(run: bytes) -> np.ndarray:
    # A run with half a token left at its end is cut, and its id will tell.
    return np.frombuffer(run[: len(run) // 4 * 4], dtype="<i4").astype(np.int32)


def _explained(error: Exception, path: Path) -> Exception:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in _NOT_ITS_FAULT:
        return ConfigError(
            f"kv_disk: the index {path} cannot be opened: {error}. "
            "Free the disk or the file, or name another folder."
        )
    return BadIndexError(str(error))
