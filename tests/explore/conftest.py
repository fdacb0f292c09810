"""A browser and a server with small models of all families, for each file of browser tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.explore.browser import Server, browser
from tests.explore.models import small


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def server(running: Any) -> Iterator[Server]:
    models = {name: small(name) for name in ("translator", "llama", "bert", "gpt")}
    found = Server(models | {"second": small("translator"), "other": small("bert")})
    yield found
    found.stop()
