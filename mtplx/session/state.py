"""What the SessionBank needs to know about state, which is otherwise opaque to it.

``models/cache.py`` makes the real ones. A ``Buffer`` is the memory of one sequence,
``Rows`` are a view of part of it: taking, cutting and keeping rows moves nothing. Rows
below the end of a sequence never change, since a sequence only grows; that is what
lets the bank keep views of a buffer that a request still writes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

TokenRun = npt.NDArray[np.int32]

TokenIds = Sequence[int] | TokenRun
"""Token ids as callers have them; a long prompt is best kept as an array."""


class Buffer(Protocol):
    """The KV memory of one sequence. Compared by identity."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included. It changes only while a request runs."""

    def copy(self, start: int, end: int) -> Rows:
        """Return rows ``[start, end)`` in a buffer of their own."""


class Rows(Protocol):
    """The KV rows of a run of tokens."""

    @property
    def buffer(self) -> Buffer:
        """What holds them."""

    @property
    def start(self) -> int:
        """The first one's index in the buffer."""

    @property
    def nbytes(self) -> int:
        """In proportion to their number: all rows of a buffer weigh the same."""

    def __len__(self) -> int: ...

    def slice(self, start: int, end: int) -> Rows:
        """Return a view of rows ``[start, end)`` of these."""


class Snapshot(Protocol):
    """The state of every layer that cannot be cut, at one index. Never written to."""

    @property
    def nbytes(self) -> int: ...
