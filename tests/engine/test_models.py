"""Several models on one engine: who is loaded, who goes, and that nobody notices."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.engine.models import EngineModels
from mtplx.errors import ConfigError, ModelLoadError, ModelNotFoundError, QueueFullError
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.types import Failed, Prompt
from tests.engine.harness import (
    PROMPT,
    TIMEOUT_S,
    Client,
    greedy_reference,
    request,
    run,
    touchy,
)
from tests.text.tokenizers_factory import make_wrapper
from tests.tiny_models import CONFIGS, make_network

NAMES = ("a", "b", "c")


def new_model(name, seed=0, network=None):
    """Return a tiny model that was just made, as loading does."""
    wrapper = make_wrapper("byte_level")
    config = {**CONFIGS["llama"], "vocab_size": len(wrapper)}
    return Model(network or make_network(config, seed=seed), config, wrapper, name=name)


@dataclass
class Shelf:
    """Makes the models ``NAMES``, each with other weights, and counts how often."""

    loads: list[str] = field(default_factory=list)

    def load(self, name) -> Callable[[], Model]:
        def make():
            self.loads.append(name)
            return new_model(name, seed=NAMES.index(name))

        return make

    @property
    def others(self):
        return {name: self.load(name) for name in NAMES[1:]}


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def start(shelf):
    """Start engines over the shelf that end with the test and leave nothing behind."""
    engines = []

    def start_engine(first=None, others=None, **settings):
        bank = SessionBank()
        others = shelf.others if others is None else others
        load = shelf.load("a") if first is None else lambda: first
        engine = Engine(load, bank, Settings(**settings), None, others)
        engines.append((engine, bank))
        engine.start()
        return engine

    yield start_engine
    for engine, bank in engines:
        engine.stop()
        assert bank.pinned == 0
        bank.check()


def references(tokens=12):
    models = [new_model(name, seed) for seed, name in enumerate(NAMES)]
    return [greedy_reference(PROMPT, tokens, model) for model in models]


def test_interleaved_models_answer_as_each_does_alone(start, shelf):
    alone = references(tokens=30)
    assert len({tuple(tokens) for tokens in alone}) == 3
    engine = start(max_models=3)
    assert (engine.names, list(engine.loaded)) == (NAMES, ["a"])
    for name in NAMES[1:]:
        assert engine.model(name).result(TIMEOUT_S).info.name == name
    assert list(engine.loaded) == [*NAMES]
    clients = {}
    for count in range(6):
        name = NAMES[count % 3]
        clients[count] = Client()
        wanted = request(PROMPT, request_id=str(count), tokens=30, model=name)
        engine.submit(wanted, clients[count])
    ends = [client.end() for client in clients.values()]
    assert {end.reason for end in ends} == {"length"}
    assert [client.tokens for client in clients.values()] == [*alone, *alone]
    assert shelf.loads == [*NAMES]
    status = engine.status()
    assert (status.waiting, status.running) == (0, 0)
    # Each model read its own prompt: state is never shared between them.
    assert sorted(end.metrics.cached_tokens for end in ends[:3]) == [0, 0, 0]


def test_a_request_for_a_model_that_is_not_loaded_waits_for_it(start, shelf):
    client, end = run(start(), PROMPT, model="b")
    assert end.reason == "length"
    assert client.tokens == references()[1]
    assert shelf.loads == ["a", "b"]


def test_no_name_means_the_first_one(start):
    client, _ = run(start(), PROMPT)
    assert client.tokens == references()[0]


def test_the_limit_unloads_the_one_that_waited_longest(start, shelf):
    engine = start(max_models=2)
    for name in ("b", "c", "b", "c"):
        run(engine, PROMPT, model=name)
        assert list(engine.loaded) == ["a", name]
    assert engine.status().iterations >= 4 * 12
    assert shelf.loads == ["a", "b", "c", "b", "c"]


def test_state_outlives_its_model(start):
    engine = start(max_models=2)
    first, _ = run(engine, PROMPT, model="b")
    run(engine, PROMPT, model="c")
    assert "b" not in engine.loaded
    again, end = run(engine, [*PROMPT, *first.tokens, 9], model="b")
    assert end.metrics.cached_tokens == len(PROMPT) + len(first.tokens) - 1
    cold = greedy_reference([*PROMPT, *first.tokens, 9], 12, new_model("b", seed=1))
    assert again.tokens == cold


def test_one_that_is_in_use_is_never_unloaded(start):
    network, busy = touchy()
    engine = start(others={"b": lambda: busy, "c": lambda: new_model("c")}, max_models=2)
    engine.model("b").result(TIMEOUT_S)
    network.hold_up()
    client = Client()
    engine.submit(request(PROMPT, model="b", tokens=100), client)
    network.entered.get(timeout=TIMEOUT_S)
    asked = engine.model("c")
    network.gate.set()
    with pytest.raises(QueueFullError, match="2 models are loaded and in use"):
        asked.result(TIMEOUT_S)
    assert client.end().reason == "length"
    assert engine.model("c").result(TIMEOUT_S).info.name == "c"
    assert list(engine.loaded) == ["a", "c"]


def test_others_answer_again_after_one_could_not_be_loaded(start):
    def broken():
        raise ValueError("no such layer")

    def missing():
        raise ModelLoadError("There are no weights.")

    engine = start(others={"b": broken, "c": missing})
    with pytest.raises(ModelLoadError, match="'b' cannot be loaded: no such layer"):
        engine.model("b").result(TIMEOUT_S)
    _, end = run(engine, PROMPT, model="c")
    assert isinstance(end, Failed)
    assert str(end.error) == "There are no weights."
    with pytest.raises(ModelNotFoundError):
        engine.model("d").result(TIMEOUT_S)
    client, _ = run(engine, PROMPT)
    assert client.tokens == references()[0]


def test_a_plan_is_that_of_the_model(start):
    engine = start()
    run(engine, PROMPT, model="b")
    prompt = Prompt((*PROMPT, 9))
    assert engine.plan(prompt, "", "b").result(TIMEOUT_S).memory_tokens == len(PROMPT)
    assert engine.plan(prompt).result(TIMEOUT_S).memory_tokens == 0


def test_two_models_of_one_name_are_refused(start):
    with pytest.raises(ConfigError, match="Two models have the name 'a'"):
        start(others={"a": lambda: new_model("a")})


def test_an_adapter_is_a_model_of_its_own(start, tmp_path):
    engine = start(others={"tuned": lambda: adapted(tmp_path)})
    plain, _ = run(engine, PROMPT)
    tuned, end = run(engine, PROMPT, model="tuned")
    assert end.metrics.cached_tokens == 0
    assert tuned.tokens == greedy_reference(PROMPT, 12, adapted(tmp_path))
    assert tuned.tokens != plain.tokens
    prints = {info.fingerprint for info in engine.loaded.values()}
    assert len(prints) == 2
    assert len({info.vocab_size for info in engine.loaded.values()}) == 1


def adapted(folder):
    """Return model ``a`` under a LoRA adapter, which is written where it is not there."""
    model = new_model("tuned")
    file = folder / "adapters.safetensors"
    if not file.exists():
        parameters = {"rank": 4, "dropout": 0.0, "scale": 10.0}
        declared = {"num_layers": 2, "lora_parameters": parameters}
        (folder / "adapter_config.json").write_text(json.dumps(declared))
        trained = new_model("trained").network
        linear_to_lora_layers(trained, 2, parameters)
        mx.random.seed(1)
        lora = [(k, v) for k, v in tree_flatten(trained.parameters()) if ".lora_" in k]
        moved = {k: v + 0.1 * mx.random.normal(v.shape) for k, v in lora}
        mx.save_safetensors(str(file), moved)
    return new_model("tuned", network=load_adapters(model.network, str(folder)))


# -- who goes when nobody asks, on a clock of the test's -------------------------------


def models_at(clock, shelf, **settings):
    models = EngineModels(
        shelf.load("a"),
        shelf.others,
        SessionBank(),
        Settings(**settings),
        clock=lambda: clock[0],
    )
    models.load_first()
    return models


def test_the_idle_go_after_their_time(shelf):
    clock = [1000.0]
    models = models_at(clock, shelf, max_models=3, idle_unload_s=60)
    assert models.rest_s() is None  # The first one stays.
    gone = weakref.ref(models.core("b").model)
    clock[0] += 40
    models.core("c")
    assert models.rest_s() == 20
    clock[0] += 19.5
    models.iterate()
    assert list(models.loaded) == [*NAMES]
    clock[0] += 0.5
    models.iterate()
    assert list(models.loaded) == ["a", "c"]
    assert gone() is None
    models.core("c")  # Asking is using.
    assert models.rest_s() == 60
    clock[0] += 1000
    models.iterate()
    assert (list(models.loaded), models.rest_s()) == (["a"], None)


def test_time_counts_from_the_end_of_the_last_request(shelf):
    clock = [1000.0]
    models = models_at(clock, shelf, idle_unload_s=60)
    client = Client()
    models.core("b").add(request(PROMPT, tokens=3), client)
    while not models.idle:
        clock[0] += 100
        models.iterate()
        assert "b" in models.loaded
    assert client.end().reason == "length"
    assert models.rest_s() == 60


def test_nobody_goes_unless_that_is_asked_for(shelf):
    clock = [1000.0]
    models = models_at(clock, shelf)
    models.core("b")
    clock[0] += 1e9
    models.iterate()
    assert list(models.loaded) == ["a", "b"]
    assert models.rest_s() is None


def test_an_engine_at_rest_wakes_up_to_unload(start):
    engine = start(idle_unload_s=0.01)
    run(engine, PROMPT, model="b")
    deadline_s = time.monotonic() + TIMEOUT_S
    while "b" in engine.loaded:
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.005)
    assert list(engine.loaded) == ["a"]
