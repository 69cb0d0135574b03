"""What a server says once it can be used: copied as it stands, it works."""

from __future__ import annotations

import shlex

import httpx
import pytest

from mtplx.cli import banner
from mtplx.engine.memory import MemoryShares
from tests.server.conftest import Server
from tests.server.fakes import INFO

SHARES = MemoryShares(16 * 2**30, 2**30, 2**31, 1_234_567)


@pytest.fixture
def server():
    running = Server()
    yield running
    running.stop()


def shown(capsys, url, **changes):
    told = {"info": INFO, "memory": SHARES, "others": (), "keyed": False} | changes
    banner.show_banner(url, **told)
    return capsys.readouterr().err


def test_model_device_memory_and_addresses(capsys):
    told = shown(capsys, "http://h:1", others=("big", "tuned"))
    for words in (
        "org/fake-model is served",
        "CPU (none), float32",
        "context 400 tokens, caches 2 trimmable",
        "16.00 GiB, of it weights 1.00 GiB, KV state up to 2.00 GiB, about 1,234,567",
        "http://h:1/v1\n",
        "big, tuned when asked for",
    ):
        assert words in told


def test_the_curl_works(capsys, server):
    (line,) = [line for line in shown(capsys, server.url).splitlines() if "  curl" in line]
    _, url, _, header, _, body = shlex.split(line)
    name, _, value = header.partition(": ")
    answer = httpx.post(url, headers={name: value}, content=body, trust_env=False)
    assert answer.json()["choices"][0]["message"]["content"].startswith("w0")


def test_a_key_is_asked_for_where_one_is_needed(capsys):
    assert "Authorization: Bearer KEY" in shown(capsys, "http://h:1", keyed=True)
    assert "Bearer" not in shown(capsys, "http://h:1")
