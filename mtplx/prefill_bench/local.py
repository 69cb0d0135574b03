"""A server of ours in this process, without HTTP: the engine that serves."""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.errors import GenerationError, InvalidRequestError
from mtplx.models import Model
from mtplx.prefill_bench.report import model_facts
from mtplx.prefill_bench.targets import Sample, Streams
from mtplx.session import SessionBank
from mtplx.session.disk import DiskTier
from mtplx.types import (
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Prompt,
    SamplingParams,
    TextDelta,
)

_STREAM_PROMPT_TOKENS = 16
_BEGUN_TOKENS = 3


class LocalTarget:
    """An engine, from construction to ``close``.

    Args:
        load: Loads the model, on the engine's thread; again after each restart.
        settings: Of the server.
        disk: Keep state on disk, too.
    """

    def __init__(
        self, load: Callable[[], Model], settings: Settings, *, disk: bool = False
    ) -> None:
        self._load = load
        self._settings = settings
        self._folder = tempfile.TemporaryDirectory(prefix="mtplx-bench-") if disk else None
        self._number = 0
        self._engine = self._start()
        self.name = self._engine.info.name

    def _start(self) -> Engine:
        settings, tier = self._settings, None
        if self._folder is not None:
            tier = DiskTier(
                Path(self._folder.name),
                max_bytes=settings.kv_disk_bytes,
                daily_write_bytes=settings.kv_disk_daily_bytes,
            )
        bank = SessionBank(settings.max_kv_size, max_bytes=settings.kv_bytes)
        engine = Engine(self._load, bank, settings, tier)
        engine.start()
        return engine

    def close(self) -> None:
        """Stop the engine and remove what it kept."""
        self._engine.stop()
        if self._folder is not None:
            self._folder.cleanup()

    def restart(self) -> None:
        """Forget what is in memory and keep what is on disk."""
        self._engine.stop()
        del self._engine
        gc.collect()  # Networks and their caches refer to each other.
        mx.clear_cache()
        self._engine = self._start()

    def facts(self) -> dict[str, Any]:
        """Say which model it is."""
        return {"url": None, "model": model_facts(self._engine.info)}

    def check(self, prompt_tokens: int, modes: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` where it cannot measure that."""
        info = self._engine.info
        if not 0 < prompt_tokens < info.context_length:
            raise InvalidRequestError(
                f"A prompt must have from 1 to {info.context_length - 1} tokens for "
                f"{info.name}, not {prompt_tokens}."
            )

    def read(self, depth_tokens: int, new_tokens: int, *, known: str, new: str) -> Sample:
        """Send a prompt and wait for its first token."""
        token_ids = self._tokens(depth_tokens, known) + self._tokens(new_tokens, new)
        mx.reset_peak_memory()
        times_s: list[float] = []
        end = self._finish(self._send(token_ids, depth_tokens, 1, times_s))
        metrics = end.metrics
        assert metrics is not None
        assert metrics.ttft_s is not None
        return Sample(
            prompt_tokens=metrics.prompt_tokens,
            cached_tokens=metrics.cached_tokens,
            ttft_s=metrics.ttft_s,
            compute_tok_s=metrics.prefill_compute_tok_s,
            cache_source=metrics.cache_source,
            peak_bytes=mx.get_peak_memory(),
        )

    @contextmanager
    def streams(self, count: int, seed: str) -> Iterator[Streams]:
        """Run streams until the block ends."""
        streams = Streams([[] for _ in range(count)])
        length = self._engine.info.context_length - _STREAM_PROMPT_TOKENS
        running = [
            self._send(self._tokens(_STREAM_PROMPT_TOKENS, f"{seed}/{n}"), 0, length, times)
            for n, times in enumerate(streams.times_s)
        ]
        try:
            while any(len(times) < _BEGUN_TOKENS for times in streams.times_s):
                time.sleep(0.005)
                if any(stream.done.is_set() for stream in running):
                    break
            yield streams
        finally:
            for stream in running:
                self._engine.cancel(stream.name)
            for stream in running:
                stream.done.wait()

    def _tokens(self, count: int, seed: str) -> list[int]:
        draw = random.Random(f"{seed}/{count}").randrange
        return [draw(self._engine.info.vocab_size) for _ in range(count)]

    def _send(
        self, token_ids: list[int], stable: int, new_tokens: int, times_s: list[float]
    ) -> _Sent:
        self._number += 1
        sent = _Sent(f"bench-{self._number}", times_s)
        request = GenerationRequest(
            request_id=sent.name,
            prompt=Prompt(tuple(token_ids), (), stable),
            max_new_tokens=new_tokens,
            arrival_s=time.perf_counter(),
            sampling=SamplingParams(temperature=0),
            ignore_eos=True,
        )
        self._engine.submit(request, sent)
        return sent

    def _finish(self, sent: _Sent) -> Finished:
        sent.done.wait()
        if isinstance(sent.end, Failed):
            raise sent.end.error
        if sent.end is None or sent.end.metrics is None:
            raise GenerationError("The engine ended a prompt before it was read.")
        return sent.end


class _Sent:
    """A request in flight; called on the engine's thread."""

    def __init__(self, name: str, times_s: list[float]) -> None:
        self.name = name
        self.end: Finished | Failed | None = None
        self.done = threading.Event()
        self._times_s = times_s

    def __call__(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._times_s.append(time.perf_counter())
        elif isinstance(event, Finished | Failed):
            self.end = event
            self.done.set()
