"""Every route and method with no key, a wrong key and a right one."""

import re
from collections.abc import Iterator

import pytest
from starlette.routing import Mount

from clearhead.predict import Model
from clearhead.serve.keys import Keys
from tests.serve.running import Running, serving

KEY = "0123456789abcdef-right"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture(scope="module")
def locked(packaged: dict[str, Model]) -> Iterator[Running]:
    with serving(packaged, Keys([KEY])) as running:
        yield running


def paths(running: Running) -> set[str]:
    """The paths of all routes, with their parameters filled."""
    found = {"/openapi.json", "/docs", "/metrics", "/none", "/", "//", "/health/", "/HEALTH", "/health%2f"}
    for path in running.app.openapi()["paths"]:
        found.add(re.sub(r"{.*?}", "x", path))
    for route in running.app.routes:
        path = getattr(route, "path", "")
        found.add(re.sub(r"{.*?}", "x", path) + ("/x" if isinstance(route, Mount) else "") or "/")
    return found - {"/health"}


def test_keys_cover_every_route_and_method(locked: Running) -> None:
    walked = paths(locked)
    assert {"/v1/completions", "/translate", "/metrics", "/ready", "/inspect/models"} <= walked
    wrong = [{}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": "Basic ZGF0YQ=="}, {"Authorization": KEY}]
    with locked.client() as client:
        for path in sorted(walked):
            for method in METHODS:
                for headers in wrong:
                    answer = client.request(method, path, headers=headers, json={})
                    assert answer.status_code == 401, (method, path)
                    assert "www-authenticate" in answer.headers
                allowed = client.request(method, path, headers={"Authorization": f"Bearer {KEY}"}, json={})
                assert allowed.status_code != 401, (method, path)
                assert allowed.status_code < 500, (method, path)
        assert client.get("/health").status_code == 200
