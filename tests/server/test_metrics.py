"""``/metrics``: what is counted, what is read, and that a scrape waits for nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from mtplx import __version__
from mtplx.metrics import PrefillMetrics
from mtplx.server.access import RequestRecord
from mtplx.server.metrics import Metrics
from mtplx.types import ITL_BOUNDS_S, DiskStats, EngineStatus, ItlSummary
from tests.server.fakes import FakeEngine
from tests.server.small_app import small_client

DISK = DiskStats(
    bytes=1001,
    files=1002,
    segments=1003,
    queue_bytes=1004,
    hits=1005,
    misses=1006,
    restored_tokens=1007,
    bytes_read=1008,
    bytes_written=1009,
    bytes_written_today=1010,
    dropped={"queue_full": 1011},
    quarantined=1012,
    evicted=1013,
    orphans=1014,
)
STATUS = EngineStatus(
    alive=True,
    waiting=101,
    running=102,
    iterations=103,
    overlapped_steps=116,
    batch_mode="rows",
    batch_fallback_reason='a "reason"',
    itl=ItlSummary(
        gaps=30,
        target_s=104.5,
        misses=105,
        total_s=106.5,
        within=(1, *[20] * (len(ITL_BOUNDS_S) - 1)),
    ),
    step_cost={"decode_s": 0.25},
    bank_tokens=107,
    bank_bytes=108,
    bank_entries=109,
    bank_evictions=110,
    pinned=111,
    bank_too_large=112,
    bank_thinned=113,
    kv_running_bytes=114,
    kv_limit_bytes=115,
    step_error=0.125,
    disk=DISK,
)
NOT_EXPORTED = {"segments": "files say it", "orphans": "told once, in the log"}


class StatusEngine(FakeEngine):
    """An engine that says it is in the state it was given."""

    def __init__(self, status: EngineStatus) -> None:
        super().__init__()
        self.said = status

    def status(self) -> EngineStatus:
        return self.said


@pytest.fixture
def engine() -> Iterator[StatusEngine]:
    engine = StatusEngine(STATUS)
    yield engine
    engine.close()


Samples = dict[tuple[str, tuple[str, ...]], float]


def samples(text: str) -> Samples:
    """Return name and label values, in the order of the labels' names -> number."""
    return {
        (sample.name, tuple(v for _, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def told(metrics: Metrics) -> Samples:
    return samples(metrics.exposition("")[0].decode())


def prefill(**changed: object) -> PrefillMetrics:
    usual = PrefillMetrics(
        prompt_tokens=10,
        cached_tokens=4,
        new_prefill_tokens=6,
        prefill_tok_s=12.0,
        prefill_compute_tok_s=20.0,
        queue_s=0.02,
        cache_restore_s=0.001,
        prefill_s=0.5,
        ttft_s=0.6,
        prefill_chunks=1,
        prefill_chunk_size=6,
        cache_source="memory",
        cache_miss_reason="diverged",
        cache_lost_tokens=3,
    )
    return dataclasses.replace(usual, **changed)  # type: ignore[arg-type]


def test_a_request_is_counted_when_it_ends(engine: FakeEngine) -> None:
    metrics = Metrics(engine)
    record = RequestRecord(
        api_key_id="k1", status=200, outcome="stop", metrics=prefill(), completion_tokens=7
    )
    metrics.observe("POST", "/v1/completions", record)
    record = RequestRecord(
        status=None,
        outcome="cancelled",
        metrics=prefill(
            cached_tokens=0, new_prefill_tokens=10, cache_source=None, ttft_s=None
        ),
    )
    metrics.observe("POST", "/v1/completions", record)
    metrics.observe("BREW", None, RequestRecord(status=404))
    said = told(metrics)
    route = "/v1/completions"
    assert said["mtplx_requests_total", ("POST", "stop", route, "200")] == 1
    assert said["mtplx_requests_total", ("POST", "cancelled", route, "499")] == 1
    assert said["mtplx_requests_total", ("other", "", "unknown", "404")] == 1
    assert said["mtplx_prompt_tokens_total", ("k1",)] == 10
    assert said["mtplx_cached_tokens_total", ("k1",)] == 4
    assert said["mtplx_new_prefill_tokens_total", ("k1",)] == 6
    assert said["mtplx_completion_tokens_total", ("k1",)] == 7
    assert said["mtplx_new_prefill_tokens_total", ("",)] == 10
    assert said["mtplx_cache_hits_total", ("memory",)] == 1
    assert said["mtplx_cache_misses_total", ("diverged",)] == 2
    assert said["mtplx_cache_lost_tokens_total", ("diverged",)] == 6
    assert said["mtplx_time_to_first_token_seconds_count", ()] == 1
    assert said["mtplx_time_to_first_token_seconds_bucket", ("0.5",)] == 0
    assert said["mtplx_time_to_first_token_seconds_bucket", ("1.0",)] == 1
    assert said["mtplx_prefill_seconds_sum", ()] == 1.0
    assert said["mtplx_queue_seconds_count", ()] == 2
    assert said["mtplx_request_duration_seconds_count", (route,)] == 2


def test_every_number_of_the_status_is_told(engine: FakeEngine) -> None:
    said = told(Metrics(engine))
    numbers = set(said.values())
    for value in (STATUS, STATUS.itl, DISK):
        for field in dataclasses.fields(value):
            number = getattr(value, field.name)
            if type(number) in (int, float) and field.name not in NOT_EXPORTED:
                assert number, f"{field.name} needs a value of its own here"
                assert number in numbers, field.name
    assert said["mtplx_disk_dropped_total", ("queue_full",)] == 1011
    assert said["mtplx_step_cost_seconds", ("decode_s",)] == 0.25
    assert said["mtplx_batch_info", ("true", "", 'a "reason"', "rows")] == 1
    assert said["mtplx_build_info", (__version__,)] == 1
    assert said["mtplx_itl_seconds_bucket", ("0.005",)] == 1
    assert said["mtplx_itl_seconds_bucket", ("+Inf",)] == 30
    assert said["mtplx_up", ()] == 1


def test_an_engine_that_has_measured_nothing(engine: StatusEngine) -> None:
    engine.said = EngineStatus(alive=True)
    names = {name for name, _ in told(Metrics(engine))}
    assert "mtplx_requests_running" in names
    assert not names & {
        "mtplx_step_error_ratio",
        "mtplx_disk_bytes",
        "mtplx_itl_seconds_sum",
    }


def test_a_dead_engine_is_down(engine: StatusEngine) -> None:
    engine.said = EngineStatus(alive=False)
    said = told(Metrics(engine))
    assert said["mtplx_up", ()] == 0
    assert ("mtplx_requests_running", ()) not in said


def test_two_applications_share_nothing(engine: FakeEngine) -> None:
    first, second = Metrics(engine), Metrics(engine)
    first.observe("GET", "/health", RequestRecord(status=200))
    key = ("mtplx_requests_total", ("GET", "", "/health", "200"))
    assert told(first)[key] == 1
    assert key not in told(second)


@pytest.fixture
def http(engine: FakeEngine) -> TestClient:
    return small_client(engine, api_key="sk-secret")


def test_a_scrape_tells_of_the_requests_before_it(http: TestClient) -> None:
    key = {"Authorization": "Bearer sk-secret"}
    http.get("/v1/models/org/fake-model", headers=key)
    http.get("/v1/models/org/other", headers=key)
    http.get("/nothing/at/all", headers=key)
    http.get("/v1/models")
    answer = http.get("/metrics", headers=key)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    counted = {
        labels: number
        for (name, labels), number in samples(answer.text).items()
        if name == "mtplx_requests_total"
    }
    assert counted == {
        ("GET", "", "/v1/models/{name:path}", "200"): 1,
        ("GET", "", "/v1/models/{name:path}", "404"): 1,
        ("GET", "", "unknown", "404"): 1,
        ("GET", "", "unknown", "401"): 1,
    }
    assert "sk-secret" not in answer.text


def test_openmetrics_is_spoken_too(http: TestClient) -> None:
    headers = {
        "Authorization": "Bearer sk-secret",
        "Accept": "application/openmetrics-text; version=1.0.0",
    }
    answer = http.get("/metrics", headers=headers)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
