"""One file of state: its bytes, its name, and how to tell that it is what it should be.

A file holds the rows of one segment, or one snapshot. It is a safetensors file whose
header says whose it is, so that a file under another's name is noticed, and its
SHA-256 stands in the index, so that any other bytes are. (SHA-256 since processors have
instructions for it: twice as fast as BLAKE2b here, and verifying costs more than
reading from memory does.)

A segment is named by a hash of what leads to it: the segment before, the index at which
it leaves that one, and its own tokens; the first hash is of the format's version and
the ``StateKey``. So equal names mean equal prefixes and equal models.

Pure functions; any thread.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from mtplx.session.state import TokenRun
from mtplx.types import HostState, StateKey

FORMAT_VERSION = 1
"""Changes whenever older files cannot be read any more; they are removed then."""

ROWS = 0
"""The index under which the rows of a segment are filed. A snapshot is filed under the
token index it was taken at, which is never 0."""

FILE_NAME = re.compile(r"[0-9a-f]{40}\.\d+\.safetensors(\.tmp)?")
"""What files of the disk tier are called; others are not touched."""

_META = "state."


class BadFileError(Exception):
    """A file is not what the index says. The message is the reason, for the log."""


@dataclass(frozen=True)
class Entry:
    """What the index knows of a file.

    Attributes:
        segment: Whose it is.
        index: ``ROWS``, or the index of the snapshot.
        nbytes: Size of the file.
        checksum: SHA-256 of the file.
    """

    segment: bytes
    index: int
    nbytes: int
    checksum: bytes

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.segment.hex()}.{self.index}.safetensors"


@dataclass(frozen=True)
class SegmentRow:
    """What the index knows of a segment: a run of tokens and what it continues.

    Attributes:
        id: Name of the segment.
        parent: Name of the segment it leaves at ``start``, or a root's.
        start: Index of its first token.
        tokens: Its tokens.
        uses: Times it was stored (1) or restored.
        last_used_s: Unix time of the last use.
    """

    id: bytes
    parent: bytes
    start: int
    tokens: TokenRun
    uses: int
    last_used_s: float

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.tokens)


@lru_cache(maxsize=256)
def root_id(key: StateKey) -> bytes:
    """Return what the first segments of a key come after."""
    words = [FORMAT_VERSION, key.fingerprint, key.any_prefix, key.namespace]
    return _digest(json.dumps(words).encode())


def segment_id(parent: bytes, start: int, tokens: TokenRun) -> bytes:
    """Return the name of the segment that leaves ``parent`` at ``start``."""
    run = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    return _digest(parent + start.to_bytes(8, "little") + run)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=20).digest()


def encode(segment: bytes, index: int, state: HostState) -> tuple[Entry, bytes]:
    """Return the entry and the bytes of a file."""
    header = {"segment": segment.hex(), "index": str(index)}
    header |= {_META + name: value for name, value in state.meta.items()}
    arrays = {name: np.asarray(a, order="C") for name, a in state.arrays.items()}
    data = save(arrays, header)
    return Entry(segment, index, len(data), hashlib.sha256(data).digest()), data


def decode(entry: Entry, data: bytes) -> HostState:
    """Return the state in a file's bytes.

    Raises:
        BadFileError: They are not the bytes that were written under this entry.
    """
    if len(data) != entry.nbytes:
        raise BadFileError(f"it has {len(data)} bytes instead of {entry.nbytes}")
    if hashlib.sha256(data).digest() != entry.checksum:
        raise BadFileError("its checksum is wrong")
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        meta: dict[str, str] = header.get("__metadata__", {})
        arrays = load(data)
    except (ValueError, SafetensorError) as error:
        raise BadFileError(f"it is not a safetensors file ({error})") from None
    if (meta.get("segment"), meta.get("index")) != (entry.segment.hex(), str(entry.index)):
        raise BadFileError("it belongs to another entry")
    own = {k.removeprefix(_META): v for k, v in meta.items() if k.startswith(_META)}
    return HostState(arrays, own)
