"""The disk tier when the disk lies: nothing wrong is served, and nobody is stopped."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

import pytest

from mtplx.errors import ConfigError
from mtplx.session.disk import audit
from mtplx.session.disk.format import ROWS, BadFileError, decode, encode
from tests.session.disk_state import (
    DENSE,
    HYBRID,
    Clock,
    fetch,
    open_tier,
    rows,
    store,
    verify,
)

SHARED = tuple(range(12))
PROMPTS = (
    (DENSE, (*SHARED, 20, 21, 22, 23)),
    (DENSE, (*SHARED[:10], 30, 31, 32, 33)),
    (HYBRID, (*SHARED, 40, 41, 42, 43)),
)
ALL_TOKENS = 3 * 12
KILLER = Path(__file__).parents[2] / "benchmarks" / "kill_writer.py"


def fill(folder):
    tier = open_tier(folder)
    for key, tokens in PROMPTS:
        inside = () if key.any_prefix else (5, 12)
        store(tier, key, tokens[:13] if key.any_prefix else tokens, inside)
    assert tier.flush(60)
    return tier


def served(folder):
    """Open, fetch everything, compare with the truth; return how much there was."""
    tier = open_tier(folder)
    tokens = 0
    for key, prompt in PROMPTS:
        tokens += fetch(tier, key, prompt[:13]).length
    assert tier.flush(60)
    tier.check()
    for key, prompt in PROMPTS:
        assert fetch(tier, key, prompt[:13]).length == tier.match(key, prompt[:13])
    stats = tier.stats()
    tier.close()
    return tokens, stats


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled")
    fill(folder).close()
    assert served(folder)[0] == ALL_TOKENS
    return folder


@pytest.fixture(scope="module")
def with_log(tmp_path_factory):
    """A folder as a killed process leaves it: the log is not folded in."""
    live, copy = tmp_path_factory.mktemp("live"), tmp_path_factory.mktemp("copy")
    tier = fill(live)
    shutil.copytree(live, copy, dirs_exist_ok=True)
    tier.close()
    (copy / "index.sqlite-shm").unlink()
    assert (copy / "index.sqlite-wal").stat().st_size > 4096
    return copy


def fresh(folder, to):
    return Path(shutil.copytree(folder, to / "kv", dirs_exist_ok=False))


def flip(path, position, mask=1):
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ mask]))


# -- one file ------------------------------------------------------------------------


def test_no_changed_byte_of_a_file_gets_through():
    entry, data = encode(b"\1" * 20, ROWS, rows(SHARED, 0, 12))
    assert decode(entry, data).meta == {"tokens": "12"}
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        with pytest.raises(BadFileError, match="checksum"):
            decode(entry, bytes(changed))
        with pytest.raises(BadFileError, match="bytes instead of"):
            decode(entry, data[:position])


@pytest.mark.parametrize(("other", "index"), [(b"\1", 8), (b"\2", ROWS)])
def test_a_file_under_another_name_is_noticed(other, index):
    """Also where the index was led to the checksum of the other file."""
    entry, data = encode(b"\1" * 20, ROWS, rows(SHARED, 0, 12))
    theirs, _ = encode(other * 20, index, rows(SHARED, 0, 12))
    led = type(entry)(theirs.segment, theirs.index, entry.nbytes, entry.checksum)
    with pytest.raises(BadFileError, match="belongs to another"):
        decode(led, data)


def kinds(folder):
    """Return a rows file in the middle of the dense prompts, and a snapshot."""
    files = sorted((folder / "segments").iterdir())
    middle = next(f for f in files if b'.tokens":"8"' in f.read_bytes())
    last = next(f for f in files if ".12." in f.name)
    return {"rows": middle, "snapshot": last}


@pytest.mark.parametrize("place", [0, 9, 0.3, 0.6, -1])
@pytest.mark.parametrize("kind", ["rows", "snapshot"])
def test_a_flipped_bit_is_set_aside_and_the_rest_served(
    filled, tmp_path, caplog, kind, place
):
    folder = fresh(filled, tmp_path)
    file = kinds(folder)[kind]
    position = int(place * file.stat().st_size) if isinstance(place, float) else place
    flip(file, position)
    tokens, stats = served(folder)
    assert 0 < tokens < ALL_TOKENS
    assert stats.quarantined == 1
    assert not file.exists()
    assert [f.name.split("-")[1] for f in (folder / "quarantine").iterdir()] == [file.name]
    assert caplog.text.count("its checksum is wrong") == 1
    assert served(folder)[1].quarantined == 0


@pytest.mark.parametrize("kind", ["rows", "snapshot"])
@pytest.mark.parametrize("when", ["closed", "open"])
def test_a_truncated_file(filled, tmp_path, caplog, kind, when):
    folder = fresh(filled, tmp_path)
    file = kinds(folder)[kind]
    if when == "closed":
        os.truncate(file, 100)
        tokens, stats = served(folder)
        assert 0 < tokens < ALL_TOKENS
        assert stats.quarantined == 1
    else:
        tier = open_tier(folder)
        os.truncate(file, 100)
        lengths = [fetch(tier, key, prompt[:13]).length for key, prompt in PROMPTS]
        assert sum(lengths) < ALL_TOKENS
        assert tier.stats().quarantined == 1
        tier.close()
    assert caplog.text.count("it has 100 bytes instead of") == 1


def test_after_a_bad_snapshot_an_earlier_one_serves(filled, tmp_path):
    folder = fresh(filled, tmp_path)
    flip(kinds(folder)["snapshot"], -1)
    tier = open_tier(folder)
    key, prompt = PROMPTS[2]
    assert tier.match(key, prompt) == 12
    assert fetch(tier, key, prompt).length == 5
    assert tier.match(key, prompt) == 5
    assert fetch(tier, key, prompt, 5).length == 5
    tier.close()


def test_what_was_bad_can_be_stored_again(filled, tmp_path):
    folder = fresh(filled, tmp_path)
    flip(kinds(folder)["rows"], 200)
    tier = open_tier(folder)
    for key, prompt in PROMPTS:
        fetch(tier, key, prompt[:13])
    for key, prompt in PROMPTS:
        store(tier, key, prompt[:13], () if key.any_prefix else (5, 12))
    tier.close()
    assert served(folder)[0] == ALL_TOKENS


def test_a_file_that_vanished(filled, tmp_path):
    folder = fresh(filled, tmp_path)
    tier = open_tier(folder)
    kinds(folder)["rows"].unlink()
    lengths = [fetch(tier, key, prompt[:13]).length for key, prompt in PROMPTS]
    assert 0 < sum(lengths) < ALL_TOKENS
    tier.close()
    assert served(folder)[0] > 0


# -- the index -----------------------------------------------------------------------


def damaged(source, name, tmp_path, count):
    """Yield copies of a folder with one bit flipped, then some cut short."""
    size = (source / name).stat().st_size
    pick = random.Random(size)
    head = [*range(0, 100, 7)]
    for number, position in enumerate(head + pick.sample(range(size), count)):
        folder = fresh(source, tmp_path / f"flip{number}")
        flip(folder / name, position, 1 << pick.randrange(8))
        yield folder
    for number, position in enumerate([0, 1, 50, 100, *pick.sample(range(size), 10)]):
        folder = fresh(source, tmp_path / f"cut{number}")
        os.truncate(folder / name, position)
        yield folder


def test_an_index_with_a_wrong_bit_or_cut_short(filled, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    lost = 0
    for folder in damaged(filled, "index.sqlite", tmp_path, 30):
        for looking in (audit.look, audit.verify):
            with suppress(ConfigError):
                looking(folder)
        lost += served(folder)[0] < ALL_TOKENS
        assert served(folder)[1].quarantined == 0  # What was wrong has been mended.
        shutil.rmtree(folder)
    assert lost > 10


def test_a_log_with_a_wrong_bit_or_cut_short(with_log, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    assert served(fresh(with_log, tmp_path / "good"))[0] == ALL_TOKENS
    lost = 0
    for folder in damaged(with_log, "index.sqlite-wal", tmp_path, 30):
        lost += served(folder)[0] < ALL_TOKENS
        shutil.rmtree(folder)
    assert lost > 10


@pytest.mark.parametrize("letter", [b"\xab", b"q"])
@pytest.mark.parametrize("text", [b"CREATE TABLE files", b"nbytes INTEGER", b"dense"])
def test_an_index_with_other_text(filled, tmp_path, letter, text):
    """SQLite quotes the text in its message, decodable or not."""
    folder = fresh(filled, tmp_path)
    index = folder / "index.sqlite"
    data = index.read_bytes()
    assert text in data
    index.write_bytes(data.replace(text, text[:-3] + letter + text[-2:]))
    assert served(folder)[0] in (0, ALL_TOKENS)
    assert served(folder)[1].quarantined == 0


def test_an_index_that_is_no_database(filled, tmp_path, caplog):
    folder = fresh(filled, tmp_path)
    (folder / "index.sqlite").write_bytes(b"not a database" * 1000)
    tokens, stats = served(folder)
    assert tokens == 0
    assert stats.quarantined == 1
    assert stats.orphans > 0
    assert "is damaged" in caplog.text
    assert [*(folder / "segments").iterdir()] == []


# -- the disk ------------------------------------------------------------------------


@contextmanager
def largest_file(nbytes):
    """Let the system refuse writes beyond a size, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_the_system_refuses(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    assert store(tier, DENSE, (1, 2, 3)) == 1
    assert tier.flush(60)
    with largest_file(1 << 20):
        assert store(tier, DENSE, tuple(range(200)), (), 256, width=2000) == 1
        assert tier.flush(60)
        assert store(tier, DENSE, (7, 8, 9)) == 0
    tier.check()
    assert tier.stats().dropped == {"write_error": 2}
    assert len([*(tmp_path / "segments").iterdir()]) == 1
    assert caplog.text.count("cannot be written to") == 1
    clock.now_s += 60
    assert store(tier, DENSE, tuple(range(200)), (), 256, width=2000) == 1
    assert tier.flush(60)
    assert "again" in caplog.text
    assert fetch(tier, DENSE, tuple(range(200))).length == 199
    tier.close()


def test_a_commit_that_the_system_refuses(tmp_path):
    """The files of the piece are small enough, the log of the index is not."""
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    store(tier, DENSE, (1, 2, 3))
    assert tier.flush(60)
    with largest_file((tmp_path / "index.sqlite-wal").stat().st_size):
        assert store(tier, DENSE, (7, 8, 9)) == 1
        assert tier.flush(60)
    assert sum(tier.stats().dropped.values()) == 1
    assert len([*(tmp_path / "segments").iterdir()]) == 1
    tier.check()
    clock.now_s += 60
    assert store(tier, DENSE, (7, 8, 9)) == 1
    tier.close()
    tier = open_tier(tmp_path)
    assert fetch(tier, DENSE, (1, 2, 3)).length == fetch(tier, DENSE, (7, 8, 9)).length == 2
    tier.close()


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_at_every_flush(tmp_path, monkeypatch, caplog, at):
    """One piece of two files flushes four times: each file, then each time the folder."""
    clock, real, calls = Clock(), os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    tier = open_tier(tmp_path, clock=clock)
    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        store(tier, HYBRID, (1, 2, 3), (3,))
        assert tier.flush(60)
    assert tier.stats().dropped == {"disk_full": 3}
    assert caplog.text.count("the disk is full") == 1
    assert [*(tmp_path / "segments").iterdir()] == []
    tier.check()
    clock.now_s += 60
    assert store(tier, HYBRID, (1, 2, 3), (3,)) == 1
    assert tier.flush(60)
    assert fetch(tier, HYBRID, (1, 2, 3, 4)).length == 3
    tier.close()


def test_what_waits_behind_a_failed_piece_is_dropped_too(tmp_path, monkeypatch):
    tier = open_tier(tmp_path)

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    taken = store(tier, DENSE, tuple(range(40)))
    assert tier.flush(60)
    assert tier.stats().dropped["disk_full"] + tier.stats().dropped.get("stale", 0) == 10
    assert taken >= 1
    assert tier.match(DENSE, range(40)) == 0
    assert tier.missing(DENSE, range(40), (), 64)[0].start == 0
    tier.check()
    tier.close()


def test_a_disk_that_hangs(tmp_path, monkeypatch, caplog):
    """Memory stays bounded, and closing gives up what does not get through in time."""
    go_on, real = Event(), os.fsync

    def slow(handle):
        assert go_on.wait(60)
        real(handle)

    tokens = tuple(range(12))
    size = rows(tokens, 0, 4).nbytes
    tier = open_tier(tmp_path, queue_bytes=3 * size)
    monkeypatch.setattr(os, "fsync", slow)
    assert store(tier, DENSE, (*tokens, 12), most=4) == 3
    assert tier.stats().dropped == {"queue_full": 1}
    assert tier.stats().queue_bytes == 3 * size
    assert not tier.flush(0)
    assert tier.match(DENSE, tokens) == 0
    assert fetch(tier, DENSE, tokens).length == 0
    closing = Thread(target=tier.close, args=(0,))
    closing.start()
    while tier.stats().dropped.get("closed", 0) == 0:
        time.sleep(0.01)
    go_on.set()
    closing.join(60)
    assert tier.stats().dropped["closed"] == 2
    tier = open_tier(tmp_path)
    assert fetch(tier, DENSE, tokens).length == 4
    tier.close()


# -- all at once ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_reads_writes_evictions_and_bad_files_at_once(tmp_path, caplog, seed):
    """Hardly anything is waited for, so that everything overlaps."""
    caplog.set_level(logging.CRITICAL)
    pick = random.Random(seed)
    tier = open_tier(tmp_path, max_bytes=700_000, clock=time.time)
    asked, answers = [], SimpleQueue()
    for step in range(240):
        key = pick.choice((DENSE, HYBRID))
        family = [pick.randrange(3)] * pick.randrange(1, 30)
        tokens = (*family, *(pick.randrange(100) for _ in range(pick.randrange(1, 30))))
        if pick.random() < 0.5:
            edges = (len(family), len(tokens))
            store(tier, key, tokens, edges, pick.choice((7, 16)), width=40)
            asked_of = tokens[: pick.randrange(1, len(tokens) + 1)]
        else:
            asked_of = pick.choice(asked)[1] if asked else tokens
        asked.append((key, asked_of))
        start = pick.choice((0, 0, 5))
        tier.fetch(key, asked_of, start, partial(_answer, answers, step, start))
        if step % 40 == 39:
            assert tier.flush(60)
            files = sorted((tmp_path / "segments").iterdir())
            flip(pick.choice(files), -1)
        tier.check()
    restored = 0
    for _ in asked:
        step, start, fetched = answers.get(timeout=60)
        verify(fetched, asked[step][0], asked[step][1], start)
        restored += fetched.length - start
    assert tier.flush(60)
    stats = tier.stats()
    assert min(restored, stats.evicted, stats.hits) > 0
    there = [*(tmp_path / "segments").iterdir()]
    assert len(there) == stats.files
    tier.close()
    tier = open_tier(tmp_path, max_bytes=700_000, clock=time.time)
    assert tier.stats().orphans == 0
    tier.check()
    tier.close()


def _answer(answers, step, start, fetched):
    answers.put((step, start, fetched))


# -- kill -9 -------------------------------------------------------------------------


def test_killed_writers_leave_nothing_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, KILLER, "--kills", "3", "--folder", tmp_path / "kv"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 kills" in done.stdout
