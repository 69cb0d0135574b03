"""``GET /metrics``: the numbers of ``/health`` and of every request, for Prometheus.

Counts what ended, from the ``RequestRecord`` that ``AccessMiddleware`` hands over, and
reads the rest from ``EngineStatus`` at each scrape, so that nothing waits for the engine
and no number has two owners. A registry of its own: two applications in a process share
nothing. What may be a label has few values by nature, or is cut off. Runs on the event
loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from mtplx import __version__
from mtplx.metrics import PrefillMetrics
from mtplx.server.access import CLIENT_GONE, RequestRecord
from mtplx.server.interfaces import EngineClient
from mtplx.server.openapi import failures
from mtplx.types import ITL_BOUNDS_S, DiskStats, EngineStatus, ModelInfo

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily | InfoMetricFamily

_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "POST"})
_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What one application has counted."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self._requests = self._counter(
            "requests",
            "Requests that ended. status 499: the client went away before the answer.",
            ("method", "route", "status", "outcome"),
        )
        self._duration_s = self._histogram(
            "request_duration", "From arrival to end.", "route"
        )
        self._ttft_s = self._histogram(
            "time_to_first_token", "From arrival to first token."
        )
        self._queue_s = self._histogram(
            "queue", "From arrival to the start of the prefill."
        )
        self._prefill_s = self._histogram("prefill", "The whole prefill, waits included.")
        self._restore_s = self._histogram("cache_restore", "Finding and restoring state.")
        # Whose tokens: the id of the API key, empty without.
        self._prompt = self._counter(
            "prompt_tokens", "Of prompts that were read.", ("key",)
        )
        self._cached = self._counter("cached_tokens", "Of these, restored.", ("key",))
        self._new = self._counter("new_prefill_tokens", "Of these, computed.", ("key",))
        self._completion = self._counter("completion_tokens", "Of answers.", ("key",))
        self._hits = self._counter(
            "cache_hits", "Prompts of which something was restored, by tier.", ("source",)
        )
        self._misses = self._counter(
            "cache_misses", "Prompts of which less was restored than was held.", ("reason",)
        )
        self._lost = self._counter(
            "cache_lost_tokens", "Tokens that were computed for that reason.", ("reason",)
        )

    def observe(self, method: str, route: str | None, record: RequestRecord) -> None:
        """Count a request that ended; the ``on_end`` of ``AccessMiddleware``."""
        route = route or "unknown"
        self._requests.labels(
            method if method in _METHODS else "other",
            route,
            str(record.status or CLIENT_GONE),
            record.outcome or "",
        ).inc()
        self._duration_s.labels(route).observe(record.age_s())
        if record.metrics is not None:
            key = record.api_key_id or ""
            self._observe_prefill(record.metrics, key)
            self._completion.labels(key).inc(record.completion_tokens)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return all numbers of this moment in a form that ``accept`` names, and its
        media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def _observe_prefill(self, prefill: PrefillMetrics, key: str) -> None:
        self._queue_s.observe(prefill.queue_s)
        self._prefill_s.observe(prefill.prefill_s)
        self._restore_s.observe(prefill.cache_restore_s)
        if prefill.ttft_s is not None:
            self._ttft_s.observe(prefill.ttft_s)
        self._prompt.labels(key).inc(prefill.prompt_tokens)
        self._cached.labels(key).inc(prefill.cached_tokens)
        self._new.labels(key).inc(prefill.new_prefill_tokens)
        if prefill.cache_source is not None:
            self._hits.labels(prefill.cache_source).inc()
        if prefill.cache_miss_reason is not None:
            self._misses.labels(prefill.cache_miss_reason).inc()
            self._lost.labels(prefill.cache_miss_reason).inc(prefill.cache_lost_tokens)

    def _counter(self, name: str, help: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"mtplx_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, *labels: str) -> Histogram:
        return Histogram(
            f"mtplx_{name}_seconds",
            help,
            labels,
            buckets=_BOUNDS_S,
            registry=self._registry,
        )


def add_routes(app: FastAPI, metrics: Metrics) -> None:
    """Add ``GET /metrics``."""

    schema = {"schema": {"type": "string"}}
    text = {"content": {"text/plain": schema, "application/openmetrics-text": schema}}

    @app.get(
        "/metrics",
        response_class=Response,
        responses=failures((401, 403, 500, 503)) | {200: text},
    )
    async def get_metrics(request: Request) -> Response:
        """Tell all numbers in the text format of Prometheus, or as OpenMetrics."""
        text, media_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": media_type})


class _Number(NamedTuple):
    name: str
    help: str
    value: Callable[[EngineStatus], float]


class _DiskNumber(NamedTuple):
    name: str
    help: str
    value: Callable[[DiskStats], float]


_GAUGES = (
    _Number("requests_waiting", "Have not started.", lambda s: s.waiting),
    _Number("requests_running", "Have started and not ended.", lambda s: s.running),
    _Number("bank_tokens", "Held by the SessionBank.", lambda s: s.bank_tokens),
    _Number("bank_bytes", "Held by the SessionBank.", lambda s: s.bank_bytes),
    _Number("bank_entries", "Held by the SessionBank.", lambda s: s.bank_entries),
    _Number("bank_pinned", "Leases that running requests hold.", lambda s: s.pinned),
    _Number("kv_running_bytes", "Held by running requests.", lambda s: s.kv_running_bytes),
)
_COUNTERS = (
    _Number("iterations", "Of the engine.", lambda s: s.iterations),
    _Number(
        "overlapped_steps",
        "Decodes begun before the last tokens were read.",
        lambda s: s.overlapped_steps,
    ),
    _Number("itl_misses", "Gaps longer than their target.", lambda s: s.itl.misses),
    _Number("bank_evictions", "Nodes removed to make room.", lambda s: s.bank_evictions),
    _Number("bank_thinned", "Snapshots removed to make room.", lambda s: s.bank_thinned),
    _Number("bank_too_large", "Times state did not fit.", lambda s: s.bank_too_large),
)
_DISK_GAUGES = (
    _DiskNumber("disk_bytes", "All in the folder.", lambda d: d.bytes),
    _DiskNumber("disk_files", "In the folder.", lambda d: d.files),
    _DiskNumber("disk_queue_bytes", "Waiting to be written.", lambda d: d.queue_bytes),
    _DiskNumber(
        "disk_written_today_bytes", "In 24 hours.", lambda d: d.bytes_written_today
    ),
)
_DISK_COUNTERS = (
    _DiskNumber("disk_written_bytes", "Written.", lambda d: d.bytes_written),
    _DiskNumber("disk_read_bytes", "Read to restore.", lambda d: d.bytes_read),
    _DiskNumber("disk_restored_tokens", "Restored.", lambda d: d.restored_tokens),
    _DiskNumber("disk_hits", "Fetches that restored something.", lambda d: d.hits),
    _DiskNumber("disk_misses", "Fetches that restored nothing.", lambda d: d.misses),
    _DiskNumber("disk_quarantined", "Files found bad.", lambda d: d.quarantined),
    _DiskNumber("disk_evictions", "Segments removed to make room.", lambda d: d.evicted),
)


class _EngineCollector(Collector):
    """Reads the engine's status at each scrape."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Family]:
        status = self._engine.status()
        yield _info("build", "This program.", version=__version__)
        yield _models(self._engine.loaded.values())
        yield GaugeMetricFamily("mtplx_up", "1 while the engine runs.", status.alive)
        if status.alive:
            yield from _of_engine(status)
        if status.disk is not None:
            yield from _of_disk(status.disk)


def _models(loaded: Iterable[ModelInfo]) -> InfoMetricFamily:
    labels = ("name", "device", "dtype", "fingerprint")
    family = InfoMetricFamily("mtplx_model", "Models in memory.", labels=labels)
    for info in loaded:
        told = {label: getattr(info, label) for label in labels}
        family.add_metric([*told.values()], {})
    return family


def _of_engine(status: EngineStatus) -> Iterator[Family]:
    yield _info(
        "batch",
        "How streams share a forward, and how prompts are read.",
        mode=status.batch_mode,
        fallback_reason=status.batch_fallback_reason or "",
        chunked_prefill=str(status.chunked_prefill).lower(),
        chunked_prefill_reason=status.chunked_prefill_reason or "",
    )
    for name, help, value in _GAUGES:
        yield GaugeMetricFamily(f"mtplx_{name}", help, value(status))
    for name, help, value in _COUNTERS:
        yield CounterMetricFamily(f"mtplx_{name}", help, value(status))
    for name, help, number in (
        (
            "itl_target_seconds",
            "Latest target of gaps between tokens.",
            status.itl.target_s,
        ),
        ("kv_limit_bytes", "Of bank and running requests.", status.kv_limit_bytes),
        ("step_error_ratio", "Median error of expected step times.", status.step_error),
    ):
        if number is not None:
            yield GaugeMetricFamily(f"mtplx_{name}", help, number)
    cost = GaugeMetricFamily(
        "mtplx_step_cost_seconds", "What a step is expected to cost.", labels=["part"]
    )
    for part, seconds in status.step_cost.items():
        cost.add_metric([part], seconds)
    yield cost
    if status.itl.within:
        bounds = [*map(str, ITL_BOUNDS_S), "+Inf"]
        counts = [*status.itl.within, status.itl.gaps]
        yield HistogramMetricFamily(
            "mtplx_itl_seconds",
            "Gaps between tokens of a stream.",
            buckets=list(zip(bounds, counts, strict=True)),
            sum_value=status.itl.total_s,
        )


def _of_disk(disk: DiskStats) -> Iterator[Family]:
    for name, help, value in _DISK_GAUGES:
        yield GaugeMetricFamily(f"mtplx_{name}", help, value(disk))
    for name, help, value in _DISK_COUNTERS:
        yield CounterMetricFamily(f"mtplx_{name}", help, value(disk))
    dropped = CounterMetricFamily(
        "mtplx_disk_dropped", "Pieces that were not written.", labels=["reason"]
    )
    for reason, count in disk.dropped.items():
        dropped.add_metric([reason], count)
    yield dropped


def _info(name: str, help: str, /, **labels: str) -> InfoMetricFamily:
    return InfoMetricFamily(f"mtplx_{name}", help, labels)
