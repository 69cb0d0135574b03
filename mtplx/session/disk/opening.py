"""Opening a folder after whatever happened to it.

What the index says and what the folder holds are made to agree again: a file without
an entry is deleted, an entry without a file forgotten, a file of another size set
aside. An index that is damaged is set aside whole, and the folder starts empty; one of
another format version is cleared.

The thread that opens the disk tier; nobody else has the folder yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from mtplx.errors import ConfigError
from mtplx.session.disk.catalog import Catalog
from mtplx.session.disk.folder import Folder
from mtplx.session.disk.forest import Forest
from mtplx.session.disk.format import Entry
from mtplx.session.disk.index import (
    INDEX_ERRORS,
    BadIndexError,
    Index,
    OtherVersionError,
    index_files,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """An index and a catalog that agree with the folder.

    Attributes:
        orphans: Files without an entry that were deleted.
        quarantined: Files that were set aside.
        written: Bytes written in each hour since 1970 that is remembered.
    """

    index: Index
    catalog: Catalog
    written: dict[int, int]
    orphans: int
    quarantined: int


def open_folder(folder: Folder, clock: Callable[[], float]) -> Opened:
    """Open a folder that has been claimed.

    Raises:
        ConfigError: The index cannot be opened for a reason outside it.
    """
    try:
        return _agree(folder, Index(folder.index), clock)
    except OtherVersionError as error:
        logger.info(
            "The KV state in %s is in another format (%s) and was removed.",
            folder.path,
            error,
        )
        folder.clear()
        quarantined = 0
    except (BadIndexError, *INDEX_ERRORS) as error:
        logger.warning(
            "The index %s is damaged (%s). It was moved to %s, and the folder starts "
            "empty: prompts are computed again.",
            folder.index,
            error,
            folder.quarantine,
        )
        folder.set_aside(*index_files(folder.index))
        quarantined = 1
    try:
        opened = _agree(folder, Index(folder.index), clock)
    except (BadIndexError, OtherVersionError, *INDEX_ERRORS) as error:
        raise ConfigError(
            f"kv_disk: no index can be made in {folder.path}: {error}. Name another folder."
        ) from None
    return replace(opened, quarantined=opened.quarantined + quarantined)


def _agree(folder: Folder, index: Index, clock: Callable[[], float]) -> Opened:
    try:
        good, quarantined = _entries_with_files(folder, index)
        forest = Forest()
        rejected = forest.load(index.roots(), index.segments(), good)
        known = {entry for segment in forest for entry in segment.entries.values()}
        unknown = [entry for entry in index.entries() if entry not in known]
        if rejected or unknown:
            logger.warning(
                "%d segments and %d files of KV state in %s cannot be used any more and "
                "were forgotten.",
                len(rejected),
                len(unknown),
                folder.path,
            )
            index.remove([row.id for row in rejected], unknown)
        written = index.written()
    except BaseException:
        index.close()
        raise
    orphans = folder.remove_others(known)
    if orphans:
        logger.info("Removed %d files without an entry from %s.", orphans, folder.path)
    return Opened(index, Catalog(forest, clock), written, orphans, quarantined)


def _entries_with_files(
    folder: Folder, index: Index
) -> tuple[dict[bytes, dict[int, Entry]], int]:
    """Return entries by segment and index whose file is there; how many were bad."""
    sizes = folder.sizes()
    good: dict[bytes, dict[int, Entry]] = {}
    quarantined = 0
    for entry in index.entries():
        size = sizes.get(entry.name)
        if size == entry.nbytes:
            good.setdefault(entry.segment, {})[entry.index] = entry
        elif size is not None:
            warn_bad(folder, entry, f"it has {size} bytes instead of {entry.nbytes}")
            folder.set_aside(folder.file(entry))
            quarantined += 1
    return good, quarantined


def warn_bad(folder: Folder, entry: Entry, reason: str) -> None:
    """Log that a file is bad."""
    logger.warning(
        "The file %s with KV state is bad: %s. It was moved to %s; its tokens will be "
        "computed again.",
        entry.name,
        reason,
        folder.quarantine,
    )
