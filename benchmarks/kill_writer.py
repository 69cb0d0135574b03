"""Kill a process that writes KV state, at random instants, and look at what it left.

    python benchmarks/kill_writer.py --kills 100

A child process opens the folder and, as fast as the disk takes it, stores conversations
that share prefixes, fetches some back, and evicts under a small cap. It is killed
(SIGKILL) at a random time. After each kill every byte that the index speaks of must be
right, as `mtplx cache verify` says; the folder must open; nothing may be left beside
what the index knows; and whatever is fetched must equal what the same tokens give
anew. The next child goes on with the folder. Exit code 1 if anything is off.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event
from zlib import crc32

import numpy as np

from mtplx.session.disk import DiskTier, Fetched
from mtplx.session.disk.audit import verify
from mtplx.types import HostState, StateKey

KEYS = (StateKey("dense", any_prefix=True), StateKey("hybrid", any_prefix=False))
CONVERSATIONS = 40
MAX_BYTES = 2 * 1024**2
LONGEST_LIFE_S = 0.5


def conversation(number: int) -> list[int]:
    """Return the tokens of one conversation; those of one family begin alike."""
    family = random.Random(number % 5)
    own = random.Random(1000 + number)
    shared = [family.randrange(1000) for _ in range(100)]
    return shared[: own.randrange(20, 100)] + [own.randrange(1000) for _ in range(100)]


def state(tokens: list[int], start: int, end: int) -> HostState:
    """Return rows that depend on every token before them."""
    value, column = 0, []
    for token in tokens[:end]:
        value = crc32(token.to_bytes(4, "little"), value)
        column.append(value)
    rows = np.repeat(np.array(column[start:], dtype=np.uint32)[:, None], 32, axis=1)
    return HostState({"k": rows, "v": rows ^ np.uint32(1)}, {"end": str(end)})


def snapshot(tokens: list[int], index: int) -> HostState:
    return HostState({"s": state(tokens, index - 1, index).arrays["k"]}, {})


def open_tier(folder: Path) -> DiskTier:
    return DiskTier(folder, max_bytes=MAX_BYTES, daily_write_bytes=1 << 60)


def fetch(tier: DiskTier, key: StateKey, tokens: list[int]) -> Fetched:
    got, done = [], Event()
    tier.fetch(key, tokens, 0, lambda fetched: (got.append(fetched), done.set()))
    done.wait()
    return got[0]


def is_true(fetched: Fetched, tokens: list[int]) -> bool:
    depth = 0
    for piece in fetched.pieces:
        if piece.start != depth:
            return False
        want = state(tokens, piece.start, piece.until).arrays
        used = piece.until - piece.start
        for name, array in piece.rows.arrays.items():
            if not np.array_equal(array[:used], want[name]):
                return False
        for index, held in piece.snapshots.items():
            if not np.array_equal(held.arrays["s"], snapshot(tokens, index).arrays["s"]):
                return False
        depth = piece.until
    return depth == fetched.length


def write(folder: Path, seed: int) -> None:
    """Write until killed."""
    pick = random.Random(seed)
    tier = open_tier(folder)
    print("open", flush=True)
    while True:
        key, tokens = pick.choice(KEYS), conversation(pick.randrange(CONVERSATIONS))
        tokens = tokens[: pick.randrange(20, len(tokens))]
        edges = sorted({len(tokens) // 2, len(tokens)})
        for piece in tier.missing(key, tokens, edges, pick.choice((16, 50))):
            whole = piece.start < piece.end
            tier.put(
                key,
                tokens,
                piece,
                state(tokens, piece.start, piece.end) if whole else None,
                {index: snapshot(tokens, index) for index in piece.snapshots},
            )
        if pick.random() < 0.3:
            fetch(tier, key, tokens)
        tier.flush()


def faults(folder: Path) -> tuple[list[str], int]:
    """Return what a kill broke, and how many tokens could be restored."""
    wrong = [f"{name}: {reason}" for name, reason in verify(folder).bad]
    tier = open_tier(folder)
    restored = 0
    for key in KEYS:
        for number in range(CONVERSATIONS):
            tokens = conversation(number)
            length = tier.match(key, tokens)
            fetched = fetch(tier, key, tokens)
            restored += fetched.length
            if fetched.length != length:
                wrong.append(f"{length} tokens promised, {fetched.length} restored")
            if not is_true(fetched, tokens):
                wrong.append(f"wrong state for conversation {number} ({key.fingerprint})")
    tier.check()
    tier.flush()
    stats = tier.stats()
    tier.close()
    there = sum(1 for _ in (folder / "segments").iterdir())
    if there != stats.files:
        wrong.append(f"{there} files in the folder, {stats.files} in the index")
    if stats.quarantined:
        wrong.append(f"{stats.quarantined} files were bad")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if size > MAX_BYTES:
        wrong.append(f"{size} bytes in the folder, {MAX_BYTES} allowed")
    return wrong, restored


def kill_once(folder: Path, seed: int, pick: random.Random) -> None:
    command = [sys.executable, __file__, "--write", str(folder), "--seed", str(seed)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    if pick.random() < 0.9:
        assert child.stdout.readline() == b"open\n"
        time.sleep(pick.uniform(0, LONGEST_LIFE_S))
    else:  # While it opens the folder.
        time.sleep(pick.uniform(0.2, 0.6))
    child.kill()
    child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.seed)
    pick = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        open_tier(folder).close()
        wrong, unfinished, restored = [], 0, []
        for number in range(options.kills):
            kill_once(folder, options.seed + number, pick)
            unfinished += verify(folder).orphans
            found, tokens = faults(folder)
            wrong += [f"kill {number}: {fault}" for fault in found]
            restored.append(tokens)
    print(
        f"{options.kills} kills, {len(wrong)} faults; {unfinished} unfinished files were "
        f"removed; {min(restored)} to {max(restored)} tokens restored after a kill"
    )
    print("\n".join(wrong))
    sys.exit(1 if wrong or not any(restored) else 0)


if __name__ == "__main__":
    main()
