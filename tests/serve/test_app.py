"""What holds for every route: keys, Host and Origin, limits of bodies, errors in OpenAI's form."""

import json
import re
import socket
import time
from pathlib import Path

import pytest

from clearhead.config.serve import ServeConfig
from clearhead.errors import UserError
from clearhead.predict import Model
from clearhead.serve.keys import Keys
from clearhead.serve.server import bind, check_address
from tests.serve.running import Running, serving

KEY, OTHER = "correct-horse-battery", "staple-correct-horse"


def test_models_are_listed(running: Running) -> None:
    with running.client() as client:
        listed = client.get("/v1/models").json()
        assert [each["id"] for each in listed["data"]] == ["novels-gpt", "en-de", "novels-bert"]
        assert client.get("/v1/models/en-de").json()["commands"] == ["translate"]
        missing = client.get("/v1/models/none")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_and_readiness(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health").json() == {"status": "ok"}
        answer = client.get("/ready")
    assert (answer.status_code, answer.json()["ready"]) == (200, True)


def test_errors_have_openais_form_and_no_internals(running: Running) -> None:
    with running.client() as client:
        answers = [client.get("/none"), client.delete("/v1/models"), client.get("/v1/models/%00"), client.get("/no//")]
    assert [answer.status_code for answer in answers] == [404, 405, 404, 404]
    for answer in answers:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert "server" not in answer.headers
        assert not re.search(r"/work|\.py|Traceback|uvicorn|\d\.\d+", answer.text)


def raw(running: Running, request: bytes) -> bytes:
    """The whole answer to some bytes."""
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), 10) as opened:
        opened.sendall(request)
        received = b""
        while piece := opened.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize(
    "request_",
    [b"\0\1\2\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"],
)
def test_what_is_not_http_is_refused_in_the_same_form(running: Running, request_: bytes) -> None:
    head, _, body = raw(running, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_head_is_get_without_a_body(running: Running) -> None:
    with running.client() as client:
        for path in ("/health", "/v1/models", "/none"):
            whole, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b"")
            assert head.headers["content-length"] == whole.headers["content-length"]
        assert client.head("/v1/completions").status_code == 405


def test_more_connections_than_allowed_are_refused() -> None:
    with serving({}, max_connections=1) as running, running.client() as client, running.client() as other:
        assert client.get("/v1/models").status_code == 200
        refused = other.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "unavailable_error")
        assert other.get("/health").status_code == 200
    with serving({}, max_connections=1) as running, running.client() as client:
        assert [client.get("/v1/models").status_code for _ in range(3)] == [200] * 3


def test_a_wrong_host_or_origin_is_refused(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health", headers={"Host": "evil.example"}).status_code == 421
        assert client.get("/health", headers={"Host": "LOCALHOST:1"}).status_code == 200
        assert client.get("/health", headers={"Origin": "https://evil.example"}).status_code == 403
        for origin in ("null", "", "http://[", "file://", "localhost"):
            assert client.get("/health", headers={"Origin": origin}).status_code == 403
        own = client.get("/health", headers={"Origin": running.url})
    assert own.status_code == 200
    two = raw(running, b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n")
    assert two.startswith(b"HTTP/1.1 400 ")
    assert "access-control-allow-origin" not in own.headers


def test_listed_origins_get_cors_headers(packaged: dict[str, Model]) -> None:
    origin = "https://good.example"
    with serving({}, cors_origins=(origin,)) as running, running.client() as client:
        answer = client.get("/health", headers={"Origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        assert client.options("/v1/completions", headers=preflight).status_code == 200
        assert client.get("/health", headers={"Origin": "https://evil.example"}).status_code == 403


def test_large_and_slow_bodies_are_refused(packaged: dict[str, Model]) -> None:
    limits = {"max_body_bytes": 2048, "body_seconds": 0.3}
    with serving({}, limits=limits) as running, running.client() as client:
        assert client.post("/v1/models", content=b"x" * 3000).status_code == 413
        chunked = client.post("/v1/models", content=(b"x" * 100 for _ in range(30)))
        assert chunked.status_code == 413
        with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as slow:
            slow.sendall(b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
            started = time.monotonic()
            assert b" 408 " in slow.recv(4096)
            assert 0.2 < time.monotonic() - started < 3


def test_keys_cover_every_route_but_health() -> None:
    with serving({}, Keys([KEY, OTHER])) as running, running.client() as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/ready", "/openapi.json", "/docs", "/metrics", "/none"):
            refused = client.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert client.get(path, headers={"Authorization": f"Bearer {KEY}x"}).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer x"}).status_code == 401
            for key in (KEY, OTHER):
                assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code != 401
        assert client.get("/v1/models", auth=("anyone", KEY)).status_code == 200
        browser = client.get("/v1/models", headers={"Accept": "text/html"})
        assert browser.headers["www-authenticate"].startswith("Basic")


def test_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\nlaptop: {KEY}\n{OTHER}\n")
    file.chmod(0o600)
    keys = Keys(file=file)
    assert (keys.find(KEY), keys.find(OTHER), keys.find("")) == ("laptop", "key-2", None)
    file.write_text(f"{OTHER}\n")
    keys.reload()
    assert (keys.find(KEY), keys.find(OTHER)) == (None, "key-1")
    file.write_text("short\n")
    with pytest.raises(UserError, match="key 1 needs 16"):
        keys.reload()
    assert keys.find(OTHER) == "key-1"


@pytest.mark.parametrize("text", ["", "# none\n", "schlüssel-schlüssel\n", "two words two words\n"])
def test_bad_key_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UserError, match=str(file)):
        Keys(file=file)
    with pytest.raises(UserError, match="cannot be read"):
        Keys(file=tmp_path / "none")


def test_other_addresses_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "example.org", "192.168.1.1"):
        with pytest.raises(UserError, match="--api-keys"):
            check_address(ServeConfig(host=host), has_keys=False)
        check_address(ServeConfig(host=host), has_keys=True)
        check_address(ServeConfig(host=host, insecure=True), has_keys=False)
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_address(ServeConfig(host=host), has_keys=False)


def test_a_port_in_use_is_one_line() -> None:
    with bind(ServeConfig(port=0)) as taken, pytest.raises(UserError, match="choose another port"):
        bind(ServeConfig(port=taken.getsockname()[1]))
