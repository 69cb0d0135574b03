"""One demo server for all scenarios; the tests leave it as they found it."""

from __future__ import annotations

import pytest

from tests.scenarios.served import served


@pytest.fixture(scope="session")
def server(demo_folder):
    with served("demo") as running:
        yield running


@pytest.fixture(scope="session")
def cold_server(demo_folder):
    """A server that keeps nothing."""
    with served("demo", "--max-kv-size", "0") as running:
        yield running


@pytest.fixture(autouse=True)
def leaves_nothing_running(request):
    yield
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.engine_when(lambda engine: engine["running"] == engine["waiting"] == 0)
        assert running.health()["engine"]["pinned"] == 0
