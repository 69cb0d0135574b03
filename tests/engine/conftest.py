"""Engines that end with their test."""

from __future__ import annotations

import pytest

from mtplx.config import Settings
from mtplx.engine import Engine
from mtplx.session import SessionBank
from tests.tiny_models import chat_model


@pytest.fixture(params=[False, True], ids=["read first", "overlapped"])
def start(request):
    """Start engines, and see to it that they end and leave nothing behind."""
    engines = []
    overlap = {"overlap_decode": request.param}

    def start_engine(model=None, **settings):
        bank = SessionBank()
        engine = Engine(
            lambda: model or chat_model(), bank, Settings(**overlap, **settings)
        )
        engine.start()
        engines.append((engine, bank))
        return engine

    yield start_engine
    for engine, bank in engines:
        engine.stop()
        assert bank.pinned == 0
        bank.check()
