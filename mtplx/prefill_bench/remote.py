"""Any server that speaks OpenAI's completions, of ours or another's.

What it does not tell is not guessed: without its count of restored tokens there is no
rate for a prompt of which some may have been restored.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from mtplx.errors import InvalidRequestError
from mtplx.prefill_bench.targets import Sample, Streams

_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child")
_STREAM_TOKENS = 2000
_BEGUN_TOKENS = 3
_WAIT_S = 600.0


class Connection(Protocol):
    """How a server is reached."""

    url: str

    def models(self) -> list[dict[str, Any]]:
        """Return what it lists."""

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post ``body`` and yield the events of the answer."""


class RemoteTarget:
    """A server at a URL.

    Args:
        name: What to call it.
        connection: To it; used by several threads.
        model: Name to ask for; None takes the first that it lists.
    """

    def __init__(self, name: str, connection: Connection, model: str | None = None) -> None:
        self.name = name
        self._connection = connection
        self._model = model or str(connection.models()[0]["id"])
        self._fingerprint: str | None = None

    def facts(self) -> dict[str, Any]:
        """Say where it is and which model it serves, as it tells itself."""
        model = {"name": self._model, "fingerprint": self._fingerprint}
        return {"url": self._connection.url, "model": model}

    def check(self, prompt_tokens: int, modes: Sequence[str]) -> None:
        """Raise ``InvalidRequestError`` for what only a server of ones own can do."""
        if "disk" in modes:
            raise InvalidRequestError(
                "From disk is measured after a restart, and a server at a URL is not "
                "restarted. Leave `disk` out of --modes."
            )

    def restart(self) -> None:
        """Not to be had."""
        raise NotImplementedError

    def read(self, depth_tokens: int, new_tokens: int, *, known: str, new: str) -> Sample:
        """Send a prompt of about that many tokens and wait for its first one."""
        text = _text(depth_tokens, known) + _text(new_tokens, new)
        begin_s = time.perf_counter()
        first_s: float | None = None
        usage: dict[str, Any] = {}
        metrics: dict[str, Any] = {}
        for chunk in self._connection.stream("/v1/completions", self._body(text, 1)):
            if first_s is None and _has_token(chunk):
                first_s = time.perf_counter()
            usage = chunk.get("usage") or usage
            metrics = chunk.get("mtplx") or metrics
            self._fingerprint = chunk.get("system_fingerprint") or self._fingerprint
        if first_s is None:
            first_s = time.perf_counter()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is None and not depth_tokens:
            cached = 0  # Nobody has ever sent this.
        return Sample(
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=cached,
            ttft_s=first_s - begin_s,
            compute_tok_s=metrics.get("prefill_compute_tok_s"),
            cache_source=metrics.get("cache_source"),
        )

    @contextmanager
    def streams(self, count: int, seed: str) -> Iterator[Streams]:
        """Run streams until the block ends."""
        streams = Streams([[] for _ in range(count)])
        enough = threading.Event()
        threads = [
            threading.Thread(target=self._run, args=(f"{seed}/{n}", times, enough))
            for n, times in enumerate(streams.times_s)
        ]
        for thread in threads:
            thread.start()
        try:
            deadline_s = time.perf_counter() + _WAIT_S
            while any(len(times) < _BEGUN_TOKENS for times in streams.times_s):
                over = not all(thread.is_alive() for thread in threads)
                if over or time.perf_counter() > deadline_s:
                    break
                time.sleep(0.005)
            yield streams
        finally:
            enough.set()
            for thread in threads:
                thread.join()

    def _run(self, seed: str, times_s: list[float], enough: threading.Event) -> None:
        text = f"{_text(8, seed)} Count from one to one thousand: one, two, three,"
        for chunk in self._connection.stream(
            "/v1/completions", self._body(text, _STREAM_TOKENS)
        ):
            if _has_token(chunk):
                times_s.append(time.perf_counter())
            if enough.is_set():
                return

    def _body(self, text: str, tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def _text(tokens: int, seed: str) -> str:
    """Return a text of about that many tokens, another one for each seed."""
    pick = random.Random(f"{seed}/{tokens}").choice
    return "".join(f" {pick(_WORDS)}" for _ in range(tokens))


def _has_token(chunk: dict[str, Any]) -> bool:
    return any(c.get("text") or c.get("finish_reason") for c in chunk.get("choices", ()))
