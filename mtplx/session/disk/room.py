"""Keeping the folder within its bytes.

What counts is all that is in the folder: state, quarantine, index, and files that are
not ours. Room is made from the quarantine first, then from the segments that are worth
least. The writer thread owns it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mtplx.session.disk.catalog import Catalog
from mtplx.session.disk.folder import Folder
from mtplx.session.disk.forest import Removed
from mtplx.session.disk.format import Entry
from mtplx.session.disk.index import INDEX_ERRORS, Index

logger = logging.getLogger(__name__)


class Room:
    """The bytes of a folder that is open. ``max_bytes`` holds from the start."""

    def __init__(
        self, folder: Folder, index: Index, catalog: Catalog, max_bytes: int
    ) -> None:
        self.evicted = 0
        self._folder = folder
        self._index = index
        self._catalog = catalog
        self._max_bytes = max_bytes
        self._other_bytes = folder.other_bytes()
        self._free(0)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is in the folder."""
        return self._beside_index() + self._index.nbytes()

    def make(self, nbytes: int) -> bool:
        """Remove what is worth least until that much more fits; False if it cannot."""
        least = self._other_bytes + self._index.room_bytes()
        return least + nbytes <= self._max_bytes and self._free(nbytes)

    def _free(self, nbytes: int) -> bool:
        while (excess := self._taken() + nbytes - self._max_bytes) > 0:
            if self._folder.forget_oldest_bad():
                continue
            removed = self._catalog.evict(excess, self._max_bytes)
            if not removed.segments:
                return False
            self.evicted += len(removed.segments)
            self.delete(removed)
        return True

    def _taken(self) -> int:
        return self._beside_index() + self._index.room_bytes()

    def _beside_index(self) -> int:
        return self._other_bytes + self._folder.quarantine_bytes + self._catalog.nbytes

    def delete(self, removed: Removed, rows: Sequence[Entry] = ()) -> None:
        """Delete what the catalog no longer holds, and the rows of more files."""
        try:
            self._index.remove(removed.segments, [*removed.entries, *rows])
        except INDEX_ERRORS as error:
            # Rows without files are left: the next open forgets them.
            logger.debug("removing rows failed: %s", error)
        self._folder.remove(removed.entries)
