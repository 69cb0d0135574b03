"""Looking at a folder of KV state without owning it: for people, beside a server.

Everything here only reads. A server that writes meanwhile may remove what is being
looked at; so what seems bad is looked up once more before it is called so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtplx.errors import ConfigError
from mtplx.session.disk.folder import Folder
from mtplx.session.disk.forest import Forest
from mtplx.session.disk.format import BadFileError, Entry, SegmentRow, decode
from mtplx.session.disk.index import (
    INDEX_ERRORS,
    BadIndexError,
    Index,
    OtherVersionError,
    recent,
)


@dataclass(frozen=True)
class StoredSegment:
    """One run of tokens and its files."""

    row: SegmentRow
    fingerprint: str
    snapshots: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    Attributes:
        segments: The least recently used first.
        nbytes: All that is in the folder.
        quarantined: Files set aside and not yet deleted.
        bytes_written_today: State written in the last 24 hours.
    """

    segments: tuple[StoredSegment, ...]
    nbytes: int
    quarantined: int
    bytes_written_today: int


@dataclass(frozen=True)
class Verdict:
    """What a check of every byte found.

    Attributes:
        files: Files that were read.
        nbytes: Their bytes.
        bad: Name and reason of what is not as it should be.
        orphans: Files that no entry speaks of; the next open deletes them.
    """

    files: int
    nbytes: int
    bad: tuple[tuple[str, str], ...]
    orphans: int


def look(path: Path) -> Contents:
    """Return what a folder holds.

    Raises:
        ConfigError: There is no usable index.
    """
    folder = Folder(path)
    try:
        with _looking(folder) as index, index.one_moment():
            fingerprints, rows = index.roots(), index.segments()
            entries, written = index.entries(), index.written()
    except BadIndexError as error:
        raise ConfigError(
            f"The index {folder.index} is damaged: {error}. "
            "`mtplx cache gc` sets it aside and starts an empty one."
        ) from None
    files: dict[bytes, list[Entry]] = {}
    for entry in entries:
        files.setdefault(entry.segment, []).append(entry)
    origin: dict[bytes, str] = dict(fingerprints)
    for row in sorted(rows, key=lambda row: row.start):
        origin[row.id] = origin.get(row.parent, "")
    segments = tuple(
        StoredSegment(
            row,
            origin[row.id],
            len(files.get(row.id, ())) - 1,
            sum(entry.nbytes for entry in files.get(row.id, ())),
        )
        for row in sorted(rows, key=lambda row: row.last_used_s)
    )
    return Contents(
        segments,
        folder.nbytes(),
        len(folder.set_aside_files()),
        sum(recent(written, time.time()).values()),
    )


def verify(path: Path) -> Verdict:
    """Read every file and compare it with the index, and the index with itself.

    Raises:
        ConfigError: There is no index, or it is of another format version.
    """
    folder = Folder(path)
    try:
        with _looking(folder) as index:
            return _verify(folder, index)
    except BadIndexError as error:
        return Verdict(0, 0, ((folder.index.name, str(error)),), len(folder.sizes()))


def _verify(folder: Folder, index: Index) -> Verdict:
    entries = index.entries()
    suspects: dict[Entry, str] = {}
    for entry in entries:
        try:
            decode(entry, folder.file(entry).read_bytes())
        except BadFileError as error:
            suspects[entry] = str(error)
        except OSError as error:
            suspects[entry] = f"it cannot be read ({error.strerror})"
    present, now = folder.sizes(), index.entries()
    bad = [(entry.name, suspects[entry]) for entry in now if entry in suspects]
    bad += [(row.id.hex(), "the row does not fit the others") for row in _misfits(index)]
    orphans = present.keys() - {entry.name for entry in [*entries, *now]}
    nbytes = sum(entry.nbytes for entry in entries)
    return Verdict(len(entries), nbytes, tuple(bad), len(orphans))


def _misfits(index: Index) -> list[SegmentRow]:
    files: dict[bytes, dict[int, Entry]] = {}
    with index.one_moment():
        for entry in index.entries():
            files.setdefault(entry.segment, {})[entry.index] = entry
        return Forest().load(index.roots(), index.segments(), files)


@contextmanager
def _looking(folder: Folder) -> Iterator[Index]:
    if not folder.index.is_file():
        raise ConfigError(
            f"There is no KV state in {folder.path}. Name the folder that "
            "`mtplx serve --kv-disk` was given."
        )
    try:
        index = Index(folder.index, read_only=True)
    except OtherVersionError as error:
        raise ConfigError(
            f"The KV state in {folder.path} is in another format ({error}). "
            "The next server that uses the folder clears it."
        ) from None
    try:
        yield index
    except INDEX_ERRORS as error:
        raise BadIndexError(str(error)) from None
    finally:
        index.close()
