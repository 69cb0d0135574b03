"""What lies in a group comes out as it would have been alone, whoever came and went."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mtplx.models import Model
from mtplx.models.batch import BatchDecoder
from mtplx.models.cache import PromptCache
from mtplx.models.group import ROW_COUNTS, row_count
from mtplx.models.layout import GRID_TOKENS
from tests.tiny_models import CONFIGS, WINDOW, make_network, prompt_ids, tiny_model

KINDS = ("llama", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2", "falcon_h1")
LENGTHS = (3, WINDOW - 1, WINDOW, 2 * WINDOW + 5, 3 * WINDOW)
"""Below, at and beyond the sliding window, and once around."""


def read(model: Model, row: int) -> PromptCache:
    cache = model.new_cache()
    model.decode(cache, 0, token_ids=prompt_ids(LENGTHS[row], seed=row))
    return cache


def all_read(model: Model) -> list[PromptCache]:
    return [read(model, row) for row in range(len(LENGTHS))]


def token(row: int, step: int) -> int:
    return (7 * row + 3 * step) % 90 + 1


def assert_same_state(found: PromptCache, expected: PromptCache) -> None:
    """Compare what both would compute next, and what they hold where that is bare."""
    assert found.offset == expected.offset
    kinds = [type(layer) for layer in found.layers]
    assert kinds == [type(layer) for layer in expected.layers]
    for mine, its in zip(found.layers, expected.layers, strict=True):
        if type(mine).__name__ != "ArraysCache":
            continue
        pairs = zip(tree_flatten(mine.state), tree_flatten(its.state), strict=True)
        for (_, a), (_, b) in pairs:
            if isinstance(a, mx.array):
                assert mx.abs(a - b).max() < 1e-4 * (1 + mx.abs(b).max())


def assert_goes_on(model: Model, cache: PromptCache, tokens: list[int]) -> None:
    """Let it read on alone, far enough for its window to close again."""
    twin = model.new_cache()
    model.decode(twin, 0, token_ids=tokens)
    assert_same_state(cache, twin)
    for step in range(WINDOW + 2):
        for each in (cache, twin):
            model.decode(each, 0, token_ids=(token(5, step),))
        assert mx.abs(cache.logits - twin.logits).max() < 1e-4


@pytest.mark.parametrize("model_type", KINDS)
def test_streams_come_and_go(model_type):
    """Each leaves after another number of steps; what is left shrinks and goes on."""
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    assert decoder.forms_groups
    caches = dict(enumerate(all_read(model)))
    tokens = {row: prompt_ids(LENGTHS[row], seed=row) for row in caches}
    most_rows = 0
    for step in range(WINDOW + 4):
        if step in (2, 3, 7, 9):
            row = {2: 1, 3: 4, 7: 0, 9: 2}[step]
            assert_goes_on(model, caches.pop(row), tokens[row])
        following = [token(row, step) for row in caches]
        assert decoder.decode([*caches.values()], following) == {}
        for row, read_token in zip(caches, following, strict=True):
            tokens[row].append(read_token)
        groups = {id(cache.place[0]) for cache in caches.values()}
        assert len(groups) == 1, "they lie together"
        most_rows = max(most_rows, next(iter(caches.values())).place[0].rows)
    assert most_rows == row_count(len(LENGTHS))
    for row, cache in caches.items():
        assert cache.place[0].rows == 1, "free rows were given up"
        assert_goes_on(model, cache, tokens[row])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("model_type", KINDS)
def test_one_that_ended_before_the_last_forward_is_put_back(model_type, together):
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    decoder.seating.holds = lambda nbytes: together
    caches = all_read(model)
    for step in range(3):
        forward = decoder.begin(caches, [token(row, step) for row in range(len(LENGTHS))])
        if step == 2:  # It turns out that these had ended.
            forward.drop(caches[1])
            forward.drop(caches[3])
        assert decoder.finish(forward) is None
    for row, cache in enumerate(caches):
        steps = 2 if row in (1, 3) else 3
        read_tokens = [token(row, step) for step in range(steps)]
        assert_goes_on(model, cache, [*prompt_ids(LENGTHS[row], seed=row), *read_tokens])


@pytest.mark.parametrize("model_type", KINDS)
def test_a_forward_can_begin_on_tokens_that_are_not_computed(model_type):
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    caches = all_read(model)
    forward = decoder.begin(caches, [token(row, 0) for row in range(len(LENGTHS))])
    rows = mx.array([*forward.rows])
    drawn = mx.argmax(forward.logits, axis=-1)[rows]
    ahead = decoder.begin(caches, drawn)
    assert decoder.finish(forward) is None
    assert decoder.finish(ahead) is None
    for row, cache in enumerate(caches):
        first = [*prompt_ids(LENGTHS[row], seed=row), token(row, 0)]
        assert_goes_on(model, cache, [*first, drawn[row].item()])


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next"])
def test_a_group_grows_with_its_longest_stream(model_type):
    model = tiny_model(model_type)
    decoder = BatchDecoder(model)
    long, short = model.new_cache(), read(model, 0)
    model.decode(long, 0, token_ids=prompt_ids(GRID_TOKENS - 3, seed=9))
    tokens = prompt_ids(GRID_TOKENS - 3, seed=9)
    for step in range(6):
        assert decoder.decode([long, short], [token(0, step), token(1, step)]) == {}
        tokens.append(token(0, step))
    assert long.place[0] is short.place[0]
    assert long.place[0].capacity == 2 * GRID_TOKENS
    short_tokens = [token(1, step) for step in range(6)]
    assert_goes_on(model, short, [*prompt_ids(LENGTHS[0], seed=0), *short_tokens])
    assert_goes_on(model, long, tokens)


def test_streams_of_very_different_lengths_lie_apart():
    model = tiny_model("llama")
    decoder = BatchDecoder(model)
    caches = [model.new_cache() for _ in range(4)]
    for cache, length in zip(caches, (5, 700, 9, 600), strict=True):
        model.prefill(cache, prompt_ids(length))
    assert decoder.decode(caches, [7] * 4) == {}
    groups = [cache.place[0] for cache in caches]
    assert groups[0] is groups[2]
    assert groups[1] is groups[3]
    assert groups[0] is not groups[1]
    for cache, length in zip(caches, (5, 700, 9, 600), strict=True):
        twin = model.new_cache()
        model.decode(twin, 0, token_ids=[*prompt_ids(length), 7])
        assert mx.abs(cache.logits - twin.logits).max() < 1e-4


def test_a_row_that_is_free_weighs_until_there_is_no_room_for_it():
    model = tiny_model("llama")
    decoder = BatchDecoder(model)
    held = []
    decoder.seating.holds = lambda nbytes: not held.append(nbytes)
    caches = [read(model, 0) for _ in range(4)]
    assert decoder.decode(caches, [7] * 4) == {}
    group = caches[0].place[0]
    assert decoder.seating.free_nbytes == 0
    caches.pop().leave()
    assert decoder.seating.free_nbytes == group.row_nbytes
    assert decoder.decode(caches, [7] * 3) == {}
    assert held[-1] == group.row_nbytes
    assert group.rows == 4
    decoder.seating.holds = lambda nbytes: nbytes == 0
    assert decoder.decode(caches, [7] * 3) == {}
    assert group.rows == 3
    assert decoder.seating.free_nbytes == 0


def test_rows_of_a_group():
    for members in range(1, 70):
        assert members <= row_count(members) <= max(1.5 * members, members + 7)
    assert [row_count(count) for count in ROW_COUNTS] == [*ROW_COUNTS]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen3_next"])
def test_replayed_forwards_are_exact(model_type):
    model = Model(make_network(CONFIGS[model_type]), CONFIGS[model_type], traces=True)
    decoder = BatchDecoder(model)
    assert decoder.traces
    caches = all_read(model)
    forwards = []
    call = type(model.network).__call__

    def counted(self, *arguments, **more):
        forwards.append(1)
        return call(self, *arguments, **more)

    type(model.network).__call__ = counted
    try:
        for step in range(WINDOW + 2):
            following = [token(row, step) for row in range(len(LENGTHS))]
            assert decoder.decode(caches, following) == {}
    finally:
        type(model.network).__call__ = call
    assert len(forwards) == 1, "traced once, replayed ever after"
    for row, cache in enumerate(caches):
        read_tokens = [token(row, step) for step in range(WINDOW + 2)]
        assert_goes_on(model, cache, [*prompt_ids(LENGTHS[row], seed=row), *read_tokens])


def test_what_cannot_be_traced_is_built_in_every_step(caplog):
    network = make_network(CONFIGS["llama"])

    class Curious(type(network)):
        def __call__(self, inputs, cache=None):
            assert inputs.tolist()
            return super().__call__(inputs, cache)

    network.__class__ = Curious
    decoder = BatchDecoder(Model(network, CONFIGS["llama"], traces=True))
    assert (decoder.forms_groups, decoder.traces) == (True, False)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "tracing them fails" in warning
