"""State that is its own tokens, for tests of the disk tier.

The row of a token is a number made of all tokens up to it, so that the right token
after another prefix shows.
"""

from __future__ import annotations

from pathlib import Path
from threading import Event
from zlib import crc32

import numpy as np

from mtplx.session.disk import DiskTier, Fetched
from mtplx.types import HostState, StateKey

DENSE = StateKey("dense", any_prefix=True)
HYBRID = StateKey("hybrid", any_prefix=False)
MIB = 1024**2


class Clock:
    """Time that stands still unless a test moves it."""

    def __init__(self, now_s: float = 1.7e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def digests(tokens):
    value, out = 0, []
    for token in tokens:
        value = crc32(int(token).to_bytes(4, "little"), value)
        out.append(value)
    return np.array(out, dtype=np.uint32)


def rows(tokens, start, end, width=3):
    """Rows ``[start, end)`` of a prompt: the token axis is the third."""
    column = digests(tokens[:end])[start:].reshape(1, 1, -1, 1)
    keys = np.repeat(column, width, axis=3)
    return HostState({"0.k": keys, "0.v": keys.astype(np.float32)}, {"tokens": str(end)})


def snapshot(tokens, index):
    return HostState({"1.state": digests(tokens[:index])[-1:]}, {"index": str(index)})


def open_tier(folder: Path, **options) -> DiskTier:
    limits = {"max_bytes": 64 * MIB, "daily_write_bytes": 1 << 40, "clock": Clock()}
    return DiskTier(folder, **(limits | options))


def store(tier, key, tokens, snapshots=(), max_piece_tokens=4, most=None, width=3):
    """Put what is missing, at most so many pieces; return how many were taken."""
    pieces = tier.missing(key, tokens, snapshots, max_piece_tokens)[:most]
    taken = [
        tier.put(
            key,
            tokens,
            piece,
            rows(tokens, piece.start, piece.end, width)
            if piece.end > piece.start
            else None,
            {index: snapshot(tokens, index) for index in piece.snapshots},
        )
        for piece in pieces
    ]
    return sum(taken)


def fetch(tier, key, tokens, start=0) -> Fetched:
    """Fetch and wait; the pieces are checked against the prompt."""
    got: list[Fetched] = []
    done = Event()
    tier.fetch(key, tokens, start, lambda fetched: (got.append(fetched), done.set()))
    assert done.wait(60)
    (fetched,) = got
    verify(fetched, key, tokens, start)
    return fetched


def verify(fetched: Fetched, key, tokens, start):
    """Assert that what was fetched is the state of these tokens and no others."""
    assert fetched.start == start
    assert (fetched.length > start) == bool(fetched.pieces)
    if not fetched.pieces:
        assert fetched.length == start
        return
    assert fetched.pieces[0].start <= start < fetched.pieces[0].until
    assert fetched.pieces[-1].until == fetched.length < len(tokens)
    for piece, following in zip(fetched.pieces, fetched.pieces[1:], strict=False):
        assert piece.until == following.start
    for piece in fetched.pieces:
        assert piece.start < piece.until <= piece.end
        used = piece.until - piece.start
        want = rows(tokens, piece.start, piece.until).arrays
        assert piece.rows.meta == {"tokens": str(piece.end)}
        for name in ("0.k", "0.v"):
            got = piece.rows.arrays[name]
            assert got.shape[2] == piece.end - piece.start
            np.testing.assert_array_equal(got[:, :, :used, :3], want[name])
            assert got.dtype == want[name].dtype
        for index, state in piece.snapshots.items():
            assert piece.start < index <= piece.until
            np.testing.assert_array_equal(
                state.arrays["1.state"], snapshot(tokens, index).arrays["1.state"]
            )
    if not key.any_prefix:
        assert list(fetched.pieces[-1].snapshots) == [fetched.length]
