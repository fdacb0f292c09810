"""A temporary token cache shared by all training tests."""

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["CLEARHEAD_CACHE"] = str(tmp_path_factory.mktemp("cache"))
