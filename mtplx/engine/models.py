"""The models of one engine: which are in memory, and who makes place for whom.

The first one is loaded at start and stays. The others are loaded when they are first
asked for, which holds up everybody; where there are too many, the one that was unused
for the longest time goes, and one that nobody uses for long goes too. A model that
somebody waits for or runs in never does. What the SessionBank keeps outlives a model:
it is filed under what the model computes, and found again when that comes back.

The engine thread owns all of it; other threads only read which models there are.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import mlx.core as mx

from mtplx.config import Settings
from mtplx.engine.core import EngineCore
from mtplx.engine.live import LiveRecorder
from mtplx.engine.memory import default_kv_bytes
from mtplx.errors import (
    ConfigError,
    ModelLoadError,
    ModelNotFoundError,
    MtplxError,
    QueueFullError,
)
from mtplx.models import Model
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.text.tokenizer import Tokenizer
from mtplx.types import ModelInfo

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 10.0
"""When to ask again for a model that has no place."""

Load = Callable[[], Model]


@dataclass(frozen=True)
class LoadedModel:
    """A model that can answer."""

    info: ModelInfo
    tokenizer: Tokenizer


@dataclass
class _Place:
    """A model in memory, and when it last was of use."""

    core: EngineCore
    used_s: float


class EngineModels:
    """See the head of this file.

    Args:
        load: Loads the first model.
        others: Load the further ones, by name.
        bank, settings, tier, wake, live: For the core of each model.
        clock: Seconds, as deadlines are told in.

    Attributes:
        names: What can be asked for, the first model first; complete once that is loaded.
    """

    def __init__(
        self,
        load: Load,
        others: Mapping[str, Load],
        bank: SessionBank,
        settings: Settings,
        *,
        tier: DiskTier | None = None,
        wake: Callable[[], None] = lambda: None,
        live: LiveRecorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.names: tuple[str, ...] = ()
        self._load_first = load
        self._others = dict(others)
        self._bank = bank
        self._settings = settings
        self._tier = tier
        self._wake = wake
        self._live = live
        self._clock = clock
        self._has_budget = bank.max_bytes is not None
        self._places: dict[str, _Place] = {}
        self._past_iterations = 0

    # -- any thread, once the first model is loaded -----------------------------

    @property
    def first(self) -> EngineCore:
        """The first model's."""
        return self._places[self.names[0]].core

    @property
    def loaded(self) -> dict[str, EngineCore]:
        """Those in memory, the first one first."""
        return {name: place.core for name, place in [*self._places.items()]}

    def get(self, name: str) -> EngineCore | None:
        """Return a model's, if it is in memory. No name means the first one."""
        place = self._places.get(name or self.names[0])
        return None if place is None else place.core

    @property
    def iterations(self) -> int:
        """Of all models so far, of those that are gone too."""
        there = sum(core.iterations for core in self.loaded.values())
        return self._past_iterations + there

    # -- engine thread ----------------------------------------------------------

    def load_first(self) -> None:
        """Load the first model.

        Raises:
            ModelLoadError: It cannot be had.
            ConfigError: The settings cannot be used, or another model has its name.
        """
        model = self._load_first()
        if model.name in self._others:
            raise ConfigError(
                f"Two models have the name {model.name!r}; give the one of `also` another."
            )
        self._add(model)
        self.names = (model.name, *self._others)
        # What is there now stays. A full collection would walk all of it, 65 ms of every
        # stream's time; the next ones walk what came since.
        gc.collect()
        gc.freeze()

    def core(self, name: str = "") -> EngineCore:
        """Return a model's, loaded if need be. No name means the first one.

        Raises:
            ModelNotFoundError: None has this name.
            ModelLoadError: It cannot be had.
            QueueFullError: As many as are allowed are in use.
        """
        name = name or self.names[0]
        if name not in self._places:
            if name not in self._others:
                raise ModelNotFoundError(f"The model {name[:200]!r} is not served here.")
            self._make_place()
            self._load(name)
        place = self._places[name]
        place.used_s = self._clock()
        return place.core

    @property
    def idle(self) -> bool:
        """There is nothing to compute."""
        return all(place.core.idle for place in self._places.values())

    def iterate(self) -> None:
        """Compute a step of each model that has something to compute, and unload those
        that nobody used for too long."""
        for place in self._places.values():
            if not place.core.unused:
                place.used_s = self._clock()
            if not place.core.idle:
                place.core.iterate()
        while (idlest := self._idlest()) and self._leaves_s(idlest) <= self._clock():
            self._unload(idlest)

    def rest_s(self) -> float | None:
        """Return for how long there will be nothing to do unless a command comes; None
        where that is forever."""
        moments_s = [core.scheduler.next_deadline_s for core in self.loaded.values()]
        if idlest := self._idlest():
            moments_s.append(self._leaves_s(idlest))
        rest_s = min(moments_s) - self._clock()
        return None if math.isinf(rest_s) else max(rest_s, 0.0)

    def _leaves_s(self, name: str) -> float:
        """When a model is unloaded if nobody asks for it."""
        patience_s = self._settings.idle_unload_s
        return math.inf if patience_s is None else self._places[name].used_s + patience_s

    def _load(self, name: str) -> None:
        begin_s = self._clock()
        try:
            model = self._others[name]()
            model.name = name
            self._add(model)
        except MtplxError as error:
            logger.warning("%s cannot be loaded: %s", name, error)
            raise
        except Exception as error:
            logger.exception("%s cannot be loaded", name)
            raise ModelLoadError(
                f"The model {name!r} cannot be loaded: {error}. The log has the details."
            ) from error
        logger.info("%s is loaded, in %.1f s", name, self._clock() - begin_s)

    def _add(self, model: Model) -> None:
        core = EngineCore(
            model,
            Tokenizer(model.tokenizer),
            self._bank,
            self._settings,
            tier=self._tier,
            wake=self._wake,
            live=self._live,
        )
        # Other threads read these, and only this one may compute them.
        _ = model.info, model.state_size
        self._places[model.name] = _Place(core, self._clock())
        self._set_budget()

    def _make_place(self) -> None:
        while len(self._places) >= self._settings.max_models:
            idlest = self._idlest()
            if idlest is None:
                raise QueueFullError(
                    f"{len(self._places)} models are loaded and in use, as many as "
                    "--max-models allows. Try again later.",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._unload(idlest)

    def _idlest(self) -> str | None:
        """The model that nobody used for the longest time, of those that may go."""
        _, *others = self._places.items()
        unused = [(place.used_s, name) for name, place in others if place.core.unused]
        return min(unused)[1] if unused else None

    def _unload(self, name: str) -> None:
        self._past_iterations += self._places.pop(name).core.iterations
        gc.collect()  # Networks and their caches refer to each other.
        mx.clear_cache()
        self._set_budget()
        logger.info("%s is unloaded", name)

    def _set_budget(self) -> None:
        """Give KV state what the machine has left, unless somebody said how much."""
        if self._has_budget:
            return
        cores = [place.core for place in self._places.values()]
        self._bank.limit(
            default_kv_bytes(
                [core.model for core in cores],
                max(core.work_bytes for core in cores),
                self._bank.nbytes,
            )
        )
