"""State that is its own tokens, so that the wrong rows show, and a request with it."""

from __future__ import annotations

from dataclasses import dataclass

from mtplx.types import StateKey

DENSE = StateKey("dense", any_prefix=True)
HYBRID = StateKey("hybrid", any_prefix=False)
BYTES_PER_TOKEN = 10


class TokenBuffer:
    """A buffer whose rows are the tokens themselves, so that wrong rows show."""

    def __init__(self, tokens=(), bytes_per_token=BYTES_PER_TOKEN):
        self.tokens = list(tokens)
        self.bytes_per_token = bytes_per_token

    @property
    def nbytes(self):
        return self.bytes_per_token * len(self.tokens)

    def rows(self, start, end):
        assert 0 <= start < end <= len(self.tokens)
        return TokenRows(self, start, end)

    def copy(self, start, end):
        copied = TokenBuffer(self.tokens[start:end], self.bytes_per_token)
        return copied.rows(0, end - start)


@dataclass(frozen=True)
class TokenRows:
    """A view: it shows what the buffer holds when it is read."""

    buffer: TokenBuffer
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def tokens(self):
        return tuple(self.buffer.tokens[self.start : self.end])

    @property
    def nbytes(self) -> int:
        return self.buffer.bytes_per_token * len(self)

    def slice(self, start: int, end: int) -> TokenRows:
        assert 0 <= start < end <= len(self)
        return TokenRows(self.buffer, self.start + start, self.start + end)


@dataclass(frozen=True)
class PrefixSnapshot:
    """A snapshot that remembers the prefix it was taken after."""

    tokens: tuple[int, ...]
    nbytes: int = 7


class Request:
    """What a request does with the bank, its state being its tokens."""

    def __init__(self, bank, prompt, key=DENSE):
        self.bank, self.key, self.prompt = bank, key, tuple(prompt)
        nbytes = BYTES_PER_TOKEN * len(self.prompt) if bank.max_bytes else 0
        self.lease = bank.acquire(key, self.prompt, reserve_bytes=nbytes)
        length = self.length = self.computed = self.lease.match.length
        if self.lease.borrowed is None:
            pieces = [token for rows in self.lease.rows for token in rows.tokens]
            self.buffer = TokenBuffer(pieces)
            assert len(pieces) == length
        else:
            self.buffer = self.lease.borrowed
        self.restored = tuple(self.buffer.tokens[:length])
        if length and not key.any_prefix:
            assert self.lease.snapshot.tokens == self.restored
        self.lease.run_in(self.buffer, nbytes)

    def compute(self, end=None):
        """Overwrite whatever lies behind the prefix, as a request does."""
        self.buffer.tokens[self.length :] = self.prompt[self.length : end]
        self.computed = len(self.buffer.tokens)

    def store(self, snapshots=(), end=None):
        tokens = self.prompt[:end]
        taken = {index: PrefixSnapshot(tokens[:index]) for index in snapshots}
        return self.bank.store(self.key, tokens, self.buffer.rows, taken, whole=True)

    def end(self, **kwargs):
        self.lease.release(**kwargs)
        if not kwargs:
            # The bank has it now; a request that is over writes no more.
            self.buffer = None
