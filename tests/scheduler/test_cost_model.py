import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtplx.errors import ConfigError
from mtplx.scheduler.cost_model import CostModel, StepCost, read_step_cost

CPU = StepCost(
    decode_s=0.06, decode_row_s=0.01, decode_depth_s=2e-6, span_s=0.06, span_token_s=0.005
)
GPU = StepCost(
    decode_s=0.008, decode_row_s=1e-4, span_s=0.006, span_token_s=7e-5, span_depth_s=1e-8
)


def teach(model: CostModel, cost: StepCost, *, steps=200, noise=0.0, seed=0) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        rows, depth = rng.randint(1, 8), rng.randint(0, 8000)
        start, tokens = rng.randint(0, 8000), rng.choice([16, 40, 128, 512, 2048])
        factor = 1 + rng.uniform(0, noise)
        model.observe_decode(rows, depth, cost.of_decode(rows, depth) * factor)
        model.observe_span(start, tokens, cost.of_span(start, tokens) * factor)


@pytest.mark.parametrize("cost", [CPU, GPU])
def test_learns_a_machine(cost):
    model = CostModel()
    teach(model, cost)
    assert model.cost.of_decode(4, 2000) == pytest.approx(cost.of_decode(4, 2000), rel=0.05)
    for tokens in (16, 256, 2048):
        wanted = cost.of_span(4000, tokens)
        assert model.cost.of_span(4000, tokens) == pytest.approx(wanted, rel=0.1)


def test_follows_a_machine_that_becomes_slower():
    model = CostModel()
    teach(model, GPU)
    teach(model, CPU)
    assert model.cost.of_span(1000, 512) == pytest.approx(CPU.of_span(1000, 512), rel=0.1)


def test_one_stray_measurement_moves_little():
    model = CostModel()
    teach(model, CPU)
    before = model.cost.of_span(0, 128)
    model.observe_span(0, 128, 60.0)
    assert model.cost.of_span(0, 128) == pytest.approx(before, rel=0.1)


def test_one_length_alone_does_not_blow_up():
    """Fits with a fading inverse covariance lose hold of what is never varied."""
    model = CostModel()
    for _ in range(5000):
        model.observe_span(0, 64, 0.38)
    assert model.cost.of_span(0, 64) == pytest.approx(0.38, rel=0.02)
    model.observe_span(0, 65, 0.39)
    assert 0.3 < model.cost.of_span(0, 65) < 0.5


def test_first_spans_are_short_and_then_double_until_they_bind():
    model = CostModel()
    lengths = []
    for _ in range(12):
        tokens = model.span_within(0.030, 0, 4096) or 16
        lengths.append(tokens)
        model.observe_span(0, tokens, GPU.of_span(0, tokens))
    assert lengths[0] <= 16
    assert all(b <= 2 * a for a, b in pairwise(lengths))
    assert lengths[-1] == pytest.approx(340, rel=0.1)


def test_margin_covers_the_noise_and_only_that():
    model = CostModel()
    teach(model, CPU)
    rng = random.Random(1)
    for _ in range(300):
        model.observe_step(1.0, 1 + rng.uniform(-0.2, 0.2), spans=True)
    assert 1.15 < model.margin <= 1.2 * 1.03
    for _ in range(300):
        model.observe_step(1.0, 0.5, spans=True)
    assert model.margin == 1.0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**6), st.integers(1, 4096), st.floats(0, 1e3, allow_nan=False)
        ),
        max_size=30,
    )
)
def test_predictions_never_shrink_as_work_grows(measurements):
    model = CostModel()
    for start, tokens, seconds in measurements:
        model.observe_span(start, tokens, seconds)
        model.observe_decode(1 + tokens % 9, start, seconds)
    cost = model.cost
    assert 0 <= cost.of_span(0, 16) <= cost.of_span(0, 17) <= cost.of_span(1, 17)
    assert 0 <= cost.of_decode(1, 0) <= cost.of_decode(2, 0) <= cost.of_decode(2, 10)
    tokens = model.span_within(0.1, 0, 512)
    assert tokens == 0 or cost.of_span(0, tokens) <= 0.1


def test_a_cost_survives_its_file(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(GPU.dumps())
    assert read_step_cost(path) == GPU


@pytest.mark.parametrize(
    "text", ["", "[]", '{"span_s": "x"}', '{"spam": 1}', '{"span_s": -1}']
)
def test_a_file_that_is_no_cost_is_refused(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cost model"):
        read_step_cost(path)


def test_a_machine_that_slows_down_is_followed_within_a_few_steps():
    """Its clock and its neighbours move all costs at once; the fit alone would take fifty
    measurements to believe it."""
    model = CostModel()
    teach(model, CPU)
    slower = 1.5
    for _ in range(12):
        predicted_s = model.cost.of_decode(3, 900)
        measured_s = slower * CPU.of_decode(3, 900)
        model.observe_decode(3, 900, measured_s)
        model.observe_step(predicted_s, measured_s, spans=False)
    assert model.cost.of_decode(3, 900) == pytest.approx(measured_s, rel=0.1)
    # Spans were not measured meanwhile, and are slower all the same.
    assert model.cost.of_span(500, 64) > 1.1 * CPU.of_span(500, 64)
