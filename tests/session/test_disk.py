"""The disk tier: what is stored comes back, once, exactly, and within its limits."""

from __future__ import annotations

import logging
import os
import sqlite3
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplx.errors import ConfigError
from mtplx.session.disk import Fetched, Piece
from mtplx.types import HostState, StateKey
from tests.session.disk_state import (
    DENSE,
    HYBRID,
    MIB,
    Clock,
    fetch,
    open_tier,
    rows,
    snapshot,
    store,
)


@pytest.fixture
def tier(tmp_path):
    with_defaults = open_tier(tmp_path / "kv")
    yield with_defaults
    with_defaults.check()
    with_defaults.close()


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def files(folder: Path) -> list[Path]:
    return sorted((folder / "segments").iterdir())


# -- against a plain model -----------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14).map(tuple)
steps = st.one_of(
    st.tuples(
        st.just("store"),
        st.sampled_from([DENSE, HYBRID]),
        prompts,
        st.sets(st.integers(1, 14), max_size=3),
        st.integers(1, 5),
        st.integers(0, 4),
    ),
    st.tuples(
        st.just("fetch"), st.sampled_from([DENSE, HYBRID]), prompts, st.integers(0, 12)
    ),
    st.tuples(st.just("reopen")),
)


class Model:
    """All prefixes whose last row is stored, and those with a snapshot, in sets."""

    def __init__(self):
        self.rows, self.snapshots = set(), set()

    def known(self, key, tokens):
        return next(
            (n for n in range(len(tokens)) if (key, tokens[: n + 1]) not in self.rows),
            len(tokens),
        )

    def match(self, key, tokens):
        usable = min(self.known(key, tokens), len(tokens) - 1)
        if key.any_prefix:
            return usable
        good = (n for n in range(1, usable + 1) if (key, tokens[:n]) in self.snapshots)
        return max(good, default=0)

    def store(self, key, tokens, pieces):
        for piece in pieces:
            for end in range(piece.start + 1, piece.end + 1):
                assert (key, tokens[:end]) not in self.rows, "written twice"
                self.rows.add((key, tokens[:end]))
            self.snapshots |= {(key, tokens[:index]) for index in piece.snapshots}


@settings(max_examples=40, deadline=None)
@given(st.lists(steps, max_size=14))
def test_it_agrees_with_a_plain_model(tmp_path_factory, script):
    folder = tmp_path_factory.mktemp("kv")
    model, tier = Model(), open_tier(folder)
    for name, *arguments in script:
        if name == "store":
            key, tokens, wanted, max_piece_tokens, most = arguments
            inside = sorted(index for index in wanted if index <= len(tokens))
            pieces = tier.missing(key, tokens, inside, max_piece_tokens)
            assert store(tier, key, tokens, inside, max_piece_tokens, most) == min(
                len(pieces), most
            )
            with_rows = [piece for piece in pieces if piece.end > piece.start]
            assert all(p.end - p.start <= max_piece_tokens for p in with_rows)
            end = len(tokens) if key.any_prefix else max(inside, default=0)
            bounds = [min(model.known(key, tokens[:end]), end)]
            for piece in with_rows:
                assert piece.start == bounds[-1]
                bounds.append(piece.end)
            assert bounds[-1] == end
            model.store(key, tokens, pieces[:most])
            if most >= len(pieces):
                assert tier.missing(key, tokens, inside, max_piece_tokens) == []
            assert tier.flush(60)
        elif name == "fetch":
            key, tokens, start = arguments
            length = model.match(key, tokens)
            assert tier.match(key, tokens) == length
            assert fetch(tier, key, tokens, start).length == max(length, start)
        else:
            tier.close()
            tier = open_tier(folder)
        tier.check()
    stats = tier.stats()
    assert not stats.dropped
    assert stats.quarantined == stats.evicted == stats.orphans == 0
    assert stats.bytes == folder_bytes(folder)
    tier.close()


# -- rules ---------------------------------------------------------------------------


def test_never_the_whole_prompt(tier):
    tokens = tuple(range(10))
    store(tier, DENSE, tokens)
    store(tier, HYBRID, tokens, {6, 10})
    tier.flush()
    assert tier.match(DENSE, tokens) == 9
    assert tier.match(HYBRID, tokens) == 6
    assert tier.match(HYBRID, (*tokens, 0)) == 10
    assert tier.match(DENSE, tokens[:1]) == tier.match(DENSE, ()) == 0


def test_a_prompt_that_leaves_a_segment_shares_it(tier):
    first, second = tuple(range(8)), (*range(5), 90, 91, 92)
    store(tier, DENSE, first, max_piece_tokens=8)
    assert tier.missing(DENSE, second, (), 8) == [Piece(5, 8)]
    store(tier, DENSE, second, max_piece_tokens=8)
    tier.flush()
    fetched = fetch(tier, DENSE, (*second, 0))
    assert [(p.start, p.until, p.end) for p in fetched.pieces] == [(0, 5, 8), (5, 8, 8)]
    assert fetched.nbytes > 0
    assert fetched.seconds > 0


def test_only_what_memory_lacks_is_read(tier):
    tokens = tuple(range(12))
    store(tier, DENSE, tokens, max_piece_tokens=4)
    tier.flush()
    assert [p.start for p in fetch(tier, DENSE, tokens, 4).pieces] == [4, 8]
    assert [p.start for p in fetch(tier, DENSE, tokens, 6).pieces] == [4, 8]
    assert fetch(tier, DENSE, tokens, 11).pieces == ()
    assert tier.restore_seconds(DENSE, tokens, 4) > tier.restore_seconds(DENSE, tokens, 8)
    assert tier.restore_seconds(DENSE, tokens, 11) == 0


def test_the_speed_is_learnt_from_large_reads_only(tier):
    small, large = (1, 2, 3), tuple(range(100, 200))
    store(tier, DENSE, small)
    store(tier, DENSE, large, max_piece_tokens=100, width=3000)
    tier.flush()
    guess_s = tier.restore_seconds(DENSE, large, 0)
    for _ in range(50):
        fetch(tier, DENSE, small)
        fetch(tier, DENSE, (7, 8, 9))
    assert tier.restore_seconds(DENSE, large, 0) == guess_s
    took_s = [fetch(tier, DENSE, large).seconds for _ in range(20)]
    learnt_s = tier.restore_seconds(DENSE, large, 0)
    assert learnt_s != guess_s
    assert min(took_s) <= learnt_s <= max(*took_s, guess_s)


def test_a_snapshot_is_found_where_another_branch_goes_on(tier):
    """Snapshots behind the point of divergence belong to the other branch."""
    first, second = tuple(range(8)), (*range(5), 90, 91, 92)
    store(tier, HYBRID, first, {3, 8}, max_piece_tokens=8)
    store(tier, HYBRID, second, {8}, max_piece_tokens=8)
    tier.flush()
    assert tier.match(HYBRID, second[:7]) == 3
    assert fetch(tier, HYBRID, (*second, 0)).length == 8
    assert fetch(tier, HYBRID, (*first, 0)).length == 8


def test_a_snapshot_can_follow_its_rows(tier):
    tokens = tuple(range(10))
    store(tier, HYBRID, tokens, {10})
    assert tier.missing(HYBRID, tokens, {4, 10}, 4) == [Piece(4, 4, (4,))]
    store(tier, HYBRID, tokens, {4, 10})
    tier.flush()
    assert fetch(tier, HYBRID, tokens).length == 4


def test_a_model_that_keeps_no_rows(tier):
    tokens = tuple(range(6))
    assert tier.put(HYBRID, tokens, Piece(0, 6, (6,)), None, {6: snapshot(tokens, 6)})
    tier.flush()
    got, done = [], Event()
    tier.fetch(HYBRID, (*tokens, 0), 0, lambda it: (got.append(it), done.set()))
    assert done.wait(60)
    (piece,) = got[0].pieces
    assert (piece.until, dict(piece.rows.arrays), list(piece.snapshots)) == (6, {}, [6])


@pytest.mark.parametrize(
    "other",
    [
        StateKey("other", any_prefix=True),
        StateKey("dense", any_prefix=False),
        StateKey("dense", any_prefix=True, namespace="someone"),
    ],
)
def test_another_key_shares_nothing(tier, other):
    tokens = tuple(range(10))
    store(tier, DENSE, tokens, {9})
    tier.flush()
    assert tier.match(other, tokens) == 0
    assert tier.missing(other, tokens, {10}, 16) == [Piece(0, 10, (10,))]


def test_arrays_of_every_shape_and_dtype_come_back(tier):
    arrays = {
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((2, 0, 3), dtype=np.float16),
        "view": np.arange(24, dtype=np.uint16).reshape(2, 3, 4).transpose(2, 0, 1)[::2],
        "flags": np.array([True, False]),
    }
    state = HostState(arrays, {"cache": '{"offset": 3}', "segment": "mine", "ключ": "é"})
    assert tier.put(DENSE, (1, 2, 3), Piece(0, 3), state, {})
    tier.flush()
    got, done = [], Event()
    tier.fetch(DENSE, (1, 2, 3, 4), 0, lambda fetched: (got.append(fetched), done.set()))
    assert done.wait(60)
    read = got[0].pieces[0].rows
    assert read.meta == state.meta
    assert read.arrays.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read.arrays[name], array)
        assert read.arrays[name].dtype == array.dtype


def test_a_restart_keeps_everything_but_the_process(tmp_path):
    tokens = tuple(range(10))
    first = open_tier(tmp_path)
    store(first, HYBRID, tokens, {5, 10})
    first.close()  # Without a flush: closing drains the queue.
    written = sum(file.stat().st_size for file in files(tmp_path))
    second = open_tier(tmp_path)
    assert fetch(second, HYBRID, (*tokens, 0)).length == 10
    stats = second.stats()
    assert (stats.hits, stats.misses, stats.restored_tokens) == (1, 0, 10)
    assert (stats.bytes_written, stats.bytes_written_today) == (0, written)
    assert stats.files == 5
    assert stats.segments == 3
    second.close()


def test_stale_pieces_are_dropped(tier):
    tokens = tuple(range(12))
    pieces = tier.missing(DENSE, tokens, (), 4)
    gap = pieces[1]
    assert not tier.put(DENSE, tokens, gap, rows(tokens, 4, 8), {})
    assert tier.put(DENSE, tokens, pieces[0], rows(tokens, 0, 4), {})
    assert not tier.put(DENSE, tokens, pieces[0], rows(tokens, 0, 4), {})
    alone = Piece(4, 4, (4,))
    assert not tier.put(HYBRID, tokens, alone, None, {4: snapshot(tokens, 4)})
    assert tier.put(DENSE, tokens, alone, None, {4: snapshot(tokens, 4)})
    assert not tier.put(DENSE, tokens, alone, None, {4: snapshot(tokens, 4)})
    tier.flush()
    assert not tier.put(DENSE, tokens, alone, None, {4: snapshot(tokens, 4)})
    assert tier.stats().dropped == {"stale": 5}


def test_a_failing_receiver_does_not_end_the_reader(tier, caplog):
    tokens = tuple(range(6))
    store(tier, DENSE, tokens)
    tier.flush()

    def fails(_: Fetched) -> None:
        raise RuntimeError("not mine")

    tier.fetch(DENSE, tokens, 0, fails)
    assert fetch(tier, DENSE, tokens).length == 5
    assert "not mine" in caplog.text


def test_state_that_cannot_be_written_does_not_end_the_writer(tier, caplog):
    bad = HostState({"z": np.zeros(3, dtype=np.complex128)}, {})
    assert tier.put(DENSE, (1, 2, 3), Piece(0, 3), bad, {})
    tier.flush()
    assert "could not be written" in caplog.text
    assert tier.stats().dropped == {"write_error": 1}
    assert store(tier, DENSE, (1, 2, 3)) == 1
    tier.flush()
    assert fetch(tier, DENSE, (1, 2, 3)).length == 2


def test_after_closing_nothing_is_taken_and_fetches_end(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, DENSE, (1, 2, 3))
    tier.close()
    tier.close()
    assert fetch(tier, DENSE, (1, 2, 3)).length == 0
    assert not tier.put(DENSE, (4, 5), Piece(0, 2), rows((4, 5), 0, 2), {})
    assert tier.stats().dropped == {"closed": 1}


# -- limits --------------------------------------------------------------------------


def test_the_cap_counts_all_that_is_in_the_folder(tmp_path):
    (tmp_path / "notes.txt").write_bytes(bytes(300_000))
    cap, clock = 2 * MIB, Clock()
    tier = open_tier(tmp_path, max_bytes=cap, clock=clock)
    for number in range(40):
        clock.now_s += 1
        assert store(tier, DENSE, (number, *range(60)), max_piece_tokens=64, width=200) == 1
        assert tier.flush(60)
        assert folder_bytes(tmp_path) <= cap
    stats = tier.stats()
    assert stats.evicted > 0
    assert 0 < stats.segments < 40
    assert tier.match(DENSE, (39, *range(60))) == 60
    assert tier.match(DENSE, (0, *range(60))) == 0
    assert stats.bytes > cap / 2
    tier.check()
    tier.close()
    # A smaller cap holds from the start.
    smaller = open_tier(tmp_path, max_bytes=cap - 500_000, clock=clock)
    assert folder_bytes(tmp_path) <= cap - 500_000
    assert smaller.match(DENSE, (39, *range(60))) == 60
    smaller.close()
    assert (tmp_path / "notes.txt").exists()


def test_what_was_used_twice_outlives_what_was_used_once(tmp_path):
    clock = Clock()
    tier = open_tier(tmp_path, max_bytes=MIB, clock=clock)
    prompts = [(number, *range(40)) for number in range(30)]
    store(tier, DENSE, prompts[0], max_piece_tokens=64, width=200)
    tier.flush()
    assert fetch(tier, DENSE, prompts[0]).length == 40
    for prompt in prompts[1:]:
        clock.now_s += 60
        store(tier, DENSE, prompt, max_piece_tokens=64, width=200)
        tier.flush()
    assert tier.stats().evicted > 0
    assert tier.match(DENSE, prompts[0]) == 40
    assert tier.match(DENSE, prompts[1]) == 0
    tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        assert db.execute("SELECT max(uses) FROM segments").fetchone() == (2,)


def test_once_popular_segments_leave_room_for_new_ones(tmp_path):
    clock = Clock()
    tier = open_tier(tmp_path, max_bytes=MIB, clock=clock)
    for number in range(30):
        clock.now_s += 60
        prompt = (number, *range(40))
        store(tier, DENSE, prompt, max_piece_tokens=64, width=200)
        tier.flush()
        assert fetch(tier, DENSE, prompt).length == 40
    tier.close()


def test_leaves_go_before_what_they_continue(tmp_path):
    clock = Clock()
    tier = open_tier(tmp_path, max_bytes=MIB, clock=clock)
    long = tuple(range(100))
    store(tier, DENSE, long, max_piece_tokens=20, width=200)
    tier.flush()
    for number in range(12):
        clock.now_s += 60
        store(tier, DENSE, (200 + number, *range(40)), max_piece_tokens=64, width=200)
        tier.flush()
        tier.check()
        kept = tier.match(DENSE, (*long, 0))
        assert kept % 20 == 0
    assert kept < 100
    tier.close()


def test_what_is_too_large_evicts_nothing(tmp_path, caplog):
    tier = open_tier(tmp_path, max_bytes=MIB)
    store(tier, DENSE, (1, 2, 3))
    tier.flush()
    for number in range(2):
        assert store(tier, DENSE, (number + 7, *range(99)), (), 128, width=3000) == 1
        tier.flush()
    assert tier.stats().dropped == {"too_large": 2}
    assert tier.match(DENSE, (1, 2, 3)) == 2
    assert tier.stats().evicted == 0
    assert caplog.text.count("does not fit the folder") == 1
    tier.close()


def test_the_queue_is_bounded_in_bytes(tmp_path, caplog):
    tier = open_tier(tmp_path, queue_bytes=1000)
    assert store(tier, DENSE, tuple(range(100)), (), 128) == 0
    assert tier.stats().dropped == {"queue_full": 1}
    assert "slower than the state comes" in caplog.text
    assert store(tier, DENSE, tuple(range(10)), (), 16) == 1
    assert tier.stats().queue_bytes in (0, rows(range(10), 0, 10).nbytes)
    tier.flush()
    assert tier.stats().queue_bytes == 0
    tier.close()


def test_the_daily_budget_survives_a_restart_and_rolls_on(tmp_path, caplog):
    clock, budget = Clock(), 60_000
    limits = {"daily_write_bytes": budget, "clock": clock}
    tier = open_tier(tmp_path, **limits)
    number = 0
    while store(tier, DENSE, (number, *range(50)), (), 64, width=20):
        tier.flush()
        number += 1
        clock.now_s += 600
    assert number > 3
    assert 0 < tier.stats().bytes_written_today <= budget
    assert tier.stats().dropped == {"daily_budget": 1}
    assert "kv_disk_daily_bytes" in caplog.text
    tier.close()
    tier = open_tier(tmp_path, **limits)
    assert tier.stats().bytes_written_today <= budget
    assert store(tier, DENSE, (number, *range(50)), (), 64, width=20) == 0
    clock.now_s += 26 * 3600
    assert tier.stats().bytes_written_today == 0
    assert store(tier, DENSE, (number, *range(50)), (), 64, width=20) == 1
    tier.close()


# -- the folder ------------------------------------------------------------------------


def test_two_tiers_on_one_folder(tmp_path):
    first = open_tier(tmp_path)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} \("):
        open_tier(tmp_path)
    first.close()
    open_tier(tmp_path).close()


def test_a_folder_that_is_none(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(file)
    with pytest.raises(ConfigError, match="cannot be used"):
        open_tier(file / "below")


def test_a_folder_that_cannot_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    nobody = 65534
    root = os.geteuid() == 0
    if root:  # Root may write anywhere.
        os.seteuid(nobody)
    try:
        with pytest.raises(ConfigError, match="can be written to"):
            open_tier(tmp_path / "kv")
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o700)


def test_nobody_else_may_look_into_a_new_folder(tmp_path):
    open_tier(tmp_path / "a" / "kv").close()
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700


def test_orphans_are_removed_and_strangers_stay(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, DENSE, (1, 2, 3))
    tier.close()
    (known,) = files(tmp_path)
    orphan = tmp_path / "segments" / f"{'ab' * 20}.0.safetensors"
    orphan.write_bytes(b"whatever")
    unfinished = known.with_name(known.name + ".tmp")
    unfinished.write_bytes(b"half")
    stranger = tmp_path / "segments" / "model.safetensors"
    stranger.write_bytes(b"somebody's")
    tier = open_tier(tmp_path)
    assert tier.stats().orphans == 2
    assert files(tmp_path) == sorted([known, stranger])
    assert fetch(tier, DENSE, (1, 2, 3)).length == 2
    tier.close()


def test_rows_without_files_are_forgotten(tmp_path, caplog):
    tier = open_tier(tmp_path)
    store(tier, DENSE, tuple(range(8)), max_piece_tokens=4)
    store(tier, HYBRID, tuple(range(4)), {2, 4})
    tier.close()
    for file in files(tmp_path):
        if ".2." in file.name or b'.tokens":"8"' in file.read_bytes():
            file.unlink()
    tier = open_tier(tmp_path)
    assert tier.match(DENSE, range(9)) == 4
    assert tier.match(HYBRID, range(4)) == 0
    assert tier.match(HYBRID, range(5)) == 4
    assert tier.stats().files == len(files(tmp_path)) == 3
    assert "1 segments and 2 files" in caplog.text
    tier.close()


def test_another_format_version_is_cleared(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tier = open_tier(tmp_path)
    store(tier, DENSE, (1, 2, 3))
    tier.close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    tier = open_tier(tmp_path)
    assert tier.match(DENSE, (1, 2, 3)) == 0
    assert files(tmp_path) == []
    (record,) = [r for r in caplog.records if "another format" in r.message]
    assert record.levelno == logging.INFO
    tier.close()


def test_an_index_that_is_locked_is_not_thrown_away(tmp_path):
    tier = open_tier(tmp_path)
    store(tier, DENSE, (1, 2, 3))
    tier.close()
    other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_tier(tmp_path)
    other.close()
    tier = open_tier(tmp_path)
    assert tier.match(DENSE, (1, 2, 3)) == 2
    tier.close()
