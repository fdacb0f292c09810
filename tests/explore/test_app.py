"""/inspect on the whole server: behind its checks of Host, Origin and keys."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from clearhead.serve.app import create_app
from clearhead.serve.inspect.frame import unframe
from clearhead.serve.keys import Keys
from tests.explore.models import small


@pytest.fixture(scope="module")
def server() -> Iterator[TestClient]:
    with TestClient(create_app({"gpt": small("gpt")})) as client:
        yield client


def test_the_server_explores_its_models(server: TestClient) -> None:
    assert [each["name"] for each in server.get("/inspect/models").json()["models"]] == ["gpt"]
    answer = server.post("/inspect/trace", json={"text": "a man"})
    header, tensors = unframe(answer.content)
    assert header["model"] == "gpt"
    assert tensors["decoder"].dim() == 4
    assert answer.headers["cache-control"] == "no-store"


def test_pages_of_other_sites_may_not_explore(server: TestClient) -> None:
    answer = server.post("/inspect/trace", json={"text": "a man"}, headers={"Origin": "http://evil.example"})
    assert answer.status_code == 403
    assert server.get("/inspect/models", headers={"Host": "evil.example"}).status_code == 421


def test_with_keys_every_route_needs_one() -> None:
    with TestClient(create_app({"gpt": small("gpt")}, keys=Keys(["a-key-of-some-length"]))) as client:
        assert client.get("/inspect/models").status_code == 401
        headers = {"Authorization": "Bearer a-key-of-some-length"}
        assert client.get("/inspect/models", headers=headers).status_code == 200
