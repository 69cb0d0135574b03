"""Fixtures shared by all tests."""

import pytest

from mtplx.models.demo import fetch_demo


@pytest.fixture(scope="session")
def demo_folder():
    """Folder of the demo model, fetched once into the user's cache."""
    return fetch_demo()
