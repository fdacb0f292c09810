"""The packaged models behind one server, for all tests that do not change it."""

from collections.abc import Iterator

import pytest

from clearhead.predict import Model, load
from tests.serve.running import Running, serving


@pytest.fixture(scope="session")
def packaged() -> dict[str, Model]:
    return {name: load(name, "cpu") for name in ("novels-gpt", "en-de", "novels-bert")}


@pytest.fixture(scope="session")
def running(packaged: dict[str, Model]) -> Iterator[Running]:
    with serving(packaged) as running:
        yield running
