"""The folder of the disk tier: who owns it, and its files.

    FOLDER/
        lock             held by the process that writes; says which
        index.sqlite     what ``index.py`` keeps
        segments/        one file for the rows of a segment, one for each snapshot
        quarantine/      what was found bad, for somebody to look at

A file appears whole or not at all: it is written under another name, flushed to the
disk, renamed, and the folder flushed. (Where a drive only says that it has flushed, the
size and the checksum in the index tell.) Files of other names than ours are never
deleted.

The thread that opened the folder, then the writer thread, changes it; the reader
thread reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mtplx.errors import ConfigError
from mtplx.session.disk.format import FILE_NAME, Entry
from mtplx.session.disk.index import index_files

_SET_ASIDE = re.compile(r"\d{19}-.+")
"""Names in quarantine begin with the time, in ns, so that they sort by age."""


class Folder:
    """A folder that need not exist yet; nothing happens to it before ``claim()``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments = path / "segments"
        self.quarantine = path / "quarantine"
        self.index = path / "index.sqlite"
        self.quarantine_bytes = 0
        self._lock: int | None = None

    # -- owning -----------------------------------------------------------------

    def claim(self) -> None:
        """Make the folder and become the only one who writes to it.

        Raises:
            ConfigError: It cannot be written to, or another process has it.
        """
        try:
            # Prompts can be read back from what is in here.
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.segments.mkdir(exist_ok=True)
            self.quarantine.mkdir(exist_ok=True)
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(
                f"kv_disk: {self.path} cannot be used: {error.strerror}. "
                "Name a folder that can be written to."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
            os.close(lock)
            raise ConfigError(
                f"kv_disk: {self.path} is in use by {owner}. "
                "Stop it, or name another folder: each server needs its own."
            ) from None
        self._lock = lock
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} ({_program()})".encode(), 0)
            probe = self.segments / f"{'0' * 40}.0.safetensors.tmp"
            probe.touch()
            probe.unlink()
        except OSError as error:
            self.release()
            raise ConfigError(
                f"kv_disk: {self.path} cannot be written to: {error.strerror}. "
                "Free the disk or name another folder."
            ) from None
        self.quarantine_bytes = sum(n for _, n in _sizes(self.set_aside_files()))

    def release(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # -- files ------------------------------------------------------------------

    def file(self, entry: Entry) -> Path:
        """Return where a file is."""
        return self.segments / entry.name

    def write(self, entry: Entry, data: bytes) -> None:
        """Write a file that survives whatever comes after.

        Raises:
            OSError: It could not; nothing of it is left.
        """
        path = self.file(entry)
        temporary = path.with_name(path.name + ".tmp")
        try:
            with temporary.open("wb") as out:
                out.write(data)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path)
            _flush_folder(self.segments)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            with contextlib.suppress(OSError):
                path.unlink()
            raise

    def remove(self, entries: Iterable[Entry]) -> None:
        """Delete files. One that cannot be deleted is an orphan for the next open."""
        for entry in entries:
            with contextlib.suppress(OSError):
                self.file(entry).unlink()

    def sizes(self) -> dict[str, int]:
        """Return the size of each of our files by name, unfinished ones included."""
        found = _sizes(self.segments.iterdir() if self.segments.is_dir() else ())
        return {f.name: size for f, size in found if FILE_NAME.fullmatch(f.name)}

    def nbytes(self) -> int:
        """Return the bytes of all that is in the folder, by looking."""
        return sum(size for _, size in _sizes(self._all_files()))

    def remove_others(self, known: Iterable[Entry]) -> int:
        """Delete the files that no entry speaks of; return how many there were."""
        removed = 0
        for name in self.sizes().keys() - {entry.name for entry in known}:
            with contextlib.suppress(OSError):
                (self.segments / name).unlink()
                removed += 1
        return removed

    def other_bytes(self) -> int:
        """Return the bytes of what is not ours: it takes room too."""
        ours = {self.segments / name for name in self.sizes()}
        ours |= {*index_files(self.index), *self.set_aside_files()}
        return sum(size for f, size in _sizes(self._all_files()) if f not in ours)

    def _all_files(self) -> Iterator[Path]:
        for at, _, names in os.walk(self.path):
            yield from (Path(at) / name for name in names)

    # -- quarantine -------------------------------------------------------------

    def set_aside(self, *paths: Path) -> None:
        """Move files to the quarantine, those that exist."""
        for path in paths:
            target = self.quarantine / f"{time.time_ns()}-{path.name}"
            with contextlib.suppress(OSError):
                path.replace(target)
                self.quarantine_bytes += target.lstat().st_size

    def set_aside_files(self) -> list[Path]:
        """Return the files in quarantine, the oldest first."""
        found = self.quarantine.iterdir() if self.quarantine.is_dir() else ()
        return sorted(file for file in found if _SET_ASIDE.fullmatch(file.name))

    def forget_oldest_bad(self) -> bool:
        """Delete the file that has been in quarantine longest; False where none is."""
        for oldest in self.set_aside_files():
            nbytes = oldest.lstat().st_size
            with contextlib.suppress(OSError):
                oldest.unlink()
                self.quarantine_bytes -= nbytes
                return True
        return False

    def clear(self) -> None:
        """Delete all of ours; it must have been claimed."""
        self.remove_others(())
        for path in (*index_files(self.index), *self.set_aside_files()):
            path.unlink(missing_ok=True)
        self.quarantine_bytes = 0


def _sizes(files: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    """Yield files with their bytes, leaving out those that vanish meanwhile."""
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            yield file, file.lstat().st_size


def _program() -> str:
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]).strip()


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
