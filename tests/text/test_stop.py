"""Stop strings are found as if the whole text had been searched at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.text.stop import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    return text, matcher.stopped


def search(stops: list[str], text: str) -> tuple[str, bool]:
    starts = [start for stop in stops if stop and (start := text.find(stop)) >= 0]
    return (text[: min(starts)], True) if starts else (text, False)


# Two letters, so that stop strings overlap, repeat and contain one another.
letters = st.text("ab", max_size=6)


@given(st.lists(letters, max_size=4), st.lists(letters, max_size=8))
def test_any_split_finds_what_a_search_of_the_whole_text_finds(stops, pieces):
    assert feed(stops, pieces) == search(stops, "".join(pieces))


@given(st.lists(letters, max_size=4), st.lists(letters, max_size=8))
def test_what_was_found_and_what_came_behind_it_is_told(stops, pieces):
    matcher = StopMatcher(stops)
    text, pushed = "", ""
    for piece in pieces:
        if not matcher.stopped:
            text += matcher.push(piece)
            pushed += piece
    text += matcher.flush()
    if matcher.stopped:
        assert matcher.stop_text in stops
        assert text + matcher.stop_text + matcher.rest == pushed
    else:
        assert (matcher.stop_text, matcher.rest) == (None, "")


@given(st.lists(letters, min_size=1, max_size=4), st.text("ab", max_size=30))
def test_nothing_is_returned_too_early_or_held_too_long(stops, text):
    stops = [stop for stop in stops if stop]
    matcher = StopMatcher(stops)
    returned = ""
    for count, char in enumerate(text, start=1):
        returned += matcher.push(char)
        if matcher.stopped:
            break
        held = text[len(returned) : count]
        assert text.startswith(returned)
        # What is held begins like a stop string: otherwise it could have been shown.
        assert not held or any(s.startswith(held) or held.startswith(s) for s in stops)


def test_only_the_possible_beginning_of_a_stop_string_is_held():
    matcher = StopMatcher(["<end>"])
    assert matcher.push("hello <e") == "hello "
    assert matcher.push("m> <") == "<em> "
    assert matcher.push("end> more") == ""
    assert matcher.stopped
    assert matcher.push("again") == ""
    assert matcher.flush() == ""


def test_an_earlier_beginning_wins_over_an_earlier_end():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == "x"
    assert not matcher.stopped
    assert matcher.push("d") == ""
    assert matcher.stopped


def test_a_match_that_waited_for_a_longer_one_counts_at_the_end():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("abc") + matcher.flush() == "a"
    assert matcher.stopped


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_text_passes_through(stops):
    matcher = StopMatcher(stops)
    assert matcher.push("any text") == "any text"
    assert matcher.flush() == ""
    assert not matcher.stopped
