"""Both kinds of server: ours in this process, and any behind a URL."""

from __future__ import annotations

import threading
import time

import pytest

from mtplx.cli.client import Client
from mtplx.config import Settings
from mtplx.errors import InvalidRequestError
from mtplx.models import Model
from mtplx.prefill_bench import LocalTarget, RemoteTarget, measure, parse_cases
from tests.models.gguf_files import tiny_llama
from tests.models.test_load import saved
from tests.server.conftest import Server
from tests.server.fakes import INFO


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny_llama())


@pytest.fixture(scope="module")
def local(folder):
    settings = Settings(prefill_window=32)
    target = LocalTarget(lambda: Model.load(str(folder)), settings, disk=True)
    yield target
    target.close()


@pytest.fixture
def server():
    running = Server()
    yield running
    running.engine.open_gate()
    running.stop()


@pytest.fixture
def remote(server):
    client = Client(server.url, None)
    yield RemoteTarget("fake", client)
    client.close()


def test_ours_in_every_mode(local):
    cases, modes = parse_cases("pp64,pp32@d96"), ["cold", "memory", "disk", "contended"]
    found = {(r.case, r.mode): r for r in measure(local, cases, modes, repeats=2)}
    # A model this small is computed faster than it is read from disk.
    disk = found.pop(("pp32@d96", "disk"))
    assert disk.prompt_tokens == 128
    assert disk.cache_source in (None, "disk")
    told = {key: (r.cached_tokens, r.new_prefill_tokens) for key, r in found.items()}
    assert told == {
        ("pp64", "cold"): (0, 64),
        ("pp64", "contended"): (0, 64),
        ("pp32@d96", "memory"): (96, 32),
        ("pp32@d96", "contended"): (96, 32),
    }
    for (_, mode), row in found.items():
        assert 0 < row.ttft_min_s <= row.ttft_s <= row.ttft_max_s
        assert 0 < row.prefill_tok_s <= row.prefill_compute_tok_s
        assert row.peak_bytes > 0
        assert (row.worst_gap_s is not None) == (mode == "contended")
    facts = local.facts()
    assert facts["model"]["name"] == "tiny"
    assert len(facts["model"]["fingerprint"]) == 32


def test_what_does_not_fit_our_model(local):
    with pytest.raises(InvalidRequestError, match="tokens for tiny, not 5000"):
        local.check(5000, ["cold"])


def test_any_server_at_a_url(remote, server):
    cold = remote.read(0, 20, known="", new="a")
    assert cold.prompt_tokens == len(server.engine.requests[-1].prompt.token_ids)
    assert cold.cached_tokens == 0
    assert server.engine.requests[-1].max_new_tokens == 1
    remote.read(20, 5, known="x", new="b")
    warm = remote.read(20, 5, known="x", new="c")
    assert 0 < warm.cached_tokens < warm.prompt_tokens
    assert remote.facts() == {
        "url": server.url,
        "model": {"name": INFO.name, "fingerprint": f"fp_{INFO.fingerprint[:12]}"},
    }


def test_time_counts_from_sending_to_the_first_token(remote, server):
    server.engine.gate.clear()
    opened = []

    def open_later():
        server.engine.wait_submitted()
        time.sleep(0.05)
        opened.append(time.perf_counter())
        server.engine.open_gate()

    opener = threading.Thread(target=open_later)
    begin_s = time.perf_counter()
    opener.start()
    sample = remote.read(0, 5, known="", new="a")
    opener.join()
    assert sample.ttft_s >= opened[0] - begin_s - 0.001


def test_streams_end_with_the_block(remote, server):
    with remote.streams(2, "s") as streams:
        assert len(streams.times_s) == 2
        assert max(len(times) for times in streams.times_s) >= 3
    server.engine.wait_idle()


def test_a_server_at_a_url_is_not_restarted(remote):
    with pytest.raises(InvalidRequestError, match="not restarted"):
        measure(remote, parse_cases("pp5@d5"), ["disk"])
