"""Metrics and documentation, draining, restarts and the command."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import httpx
import pytest

from clearhead.cli.serve import serve
from clearhead.errors import UserError
from clearhead.predict import Model
from clearhead.serve.keys import Keys
from tests.serve.commands import started
from tests.serve.running import Running, serving


def metric(running: Running, name: str, **labels: str) -> float:
    with running.client() as client:
        text = client.get("/metrics").text
    shown = ",".join(f'{key}="{value}"' for key, value in labels.items())
    found = re.search(rf"^{re.escape(name)}(?:{{{re.escape(shown)}}})? (\S+)$", text, re.M)
    return 0.0 if found is None else float(found[1])


def test_metrics_count_requests_and_tokens(packaged: dict[str, Model]) -> None:
    with serving({"gpt": packaged["novels-gpt"]}) as running, running.client() as client:
        body: dict[str, Any] = {"prompt": "It was", "max_tokens": 7}
        for _ in range(3):
            client.post("/v1/completions", json=body)
        client.post("/v1/completions", json=body | {"n": 0})
        client.get("/none")
        assert metric(running, "clearhead_requests_total", route="/v1/completions", status="200") == 3
        assert metric(running, "clearhead_requests_total", route="/v1/completions", status="400") == 1
        assert metric(running, "clearhead_new_tokens_total", model="gpt") == 21
        assert metric(running, "clearhead_first_token_seconds_count", model="gpt") == 3
        assert metric(running, "clearhead_ready", model="gpt") == 1
        assert metric(running, "clearhead_running", model="gpt") == 0


def test_the_documentation_needs_no_network(running: Running) -> None:
    with running.client() as client:
        page = client.get("/docs")
        schema = client.get("/openapi.json").json()
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r"(src|href)=.?https?:", page.text)
    for path, methods in schema["paths"].items():
        assert path in page.text
        for operation in methods.values():
            assert operation["description"]
            assert "422" not in operation["responses"]
            if path != "/health":
                assert "default" in operation["responses"]


MODELS = ("novels-gpt", "en-de")


def test_sigterm_finishes_running_requests() -> None:
    body = {"prompt": "It was", "max_tokens": 150, "stream": True, "n": 2, "model": "novels-gpt"}
    running = threading.Barrier(11)

    def stream(url: str) -> list[str]:
        lines: list[str] = []
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if not lines:
                    running.wait(30)
                lines.append(line)
        return lines

    with started(MODELS) as (process, url), futures.ThreadPoolExecutor(10) as pool, httpx.Client() as other:
        assert other.get(f"{url}/v1/models").status_code == 200
        streams = [pool.submit(stream, url) for _ in range(10)]
        running.wait(30)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = other.get(f"{url}/v1/models")
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "unavailable_error"
        for each in streams:
            lines = each.result(60)
            assert lines[-2] == "data: [DONE]"
            finished = [
                line for line in lines if '"finish_reason":"length"' in line or '"finish_reason":"stop"' in line
            ]
            assert len(finished) == 2
        assert process.wait(10) == 0


def test_sighup_revokes_keys(tmp_path: Path) -> None:
    file, old, new = tmp_path / "keys", "old-key-0123456789", "new-key-0123456789"
    file.write_text(old)
    with started(MODELS, options=["--api-keys", str(file)]) as (process, url), httpx.Client(base_url=url) as client:
        assert client.get("/ready", headers={"Authorization": f"Bearer {old}"}).status_code == 200
        file.write_text(new)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert client.get("/ready", headers={"Authorization": f"Bearer {old}"}).status_code == 401
        assert client.get("/ready", headers={"Authorization": f"Bearer {new}"}).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_an_engine_that_fails_starts_again_and_others_go_on(
    packaged: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clearhead.serve.registry.FIRST_BACKOFF", 0.6)
    models = {"gpt": packaged["novels-gpt"], "en-de": packaged["en-de"]}
    with serving(models) as running, running.client() as client:
        engine = running.registry.get("gpt").engine.engine
        step, steps = engine.step, iter(range(50))

        def fail() -> Any:
            if next(steps, None) is None:
                raise RuntimeError("a kernel failed")
            return step()

        monkeypatch.setattr(engine, "step", fail)
        body = {"prompt": "It was", "max_tokens": 400, "model": "gpt"}
        failed = client.post("/v1/completions", json=body)
        assert (failed.status_code, failed.json()["error"]["code"]) == (503, "engine_failed")
        assert "kernel" not in failed.text
        state = client.get("/ready")
        assert (state.status_code, state.json()["models"]) == (503, {"gpt": "failed", "en-de": "ready"})
        assert client.post("/translate", json={"q": "Hello.", "source": "en", "target": "de"}).status_code == 200
        deadline = time.monotonic() + 10
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.post("/v1/completions", json=body).status_code == 200
        assert metric(running, "clearhead_engine_failures_total", model="gpt") == 1


def test_streams_of_a_failed_engine_end_with_an_error(
    packaged: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({"gpt": packaged["novels-gpt"]}) as running, running.client() as client:
        body = {"prompt": "It was", "max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            monkeypatch.setattr(running.registry.get("gpt").engine.engine, "step", lambda: 1 / 0)
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "engine_failed"


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        (["none"], {}, "no model 'none'"),
        (["novels-gpt", "novels-gpt"], {}, "two models have this name"),
        (["novels-gpt"], {"api_keys": Path("/none/keys")}, "cannot be read"),
        (["novels-gpt"], {"host": "0.0.0.0"}, "--api-keys"),
        (["novels-gpt"], {"host": "none.invalid", "insecure": True}, "cannot listen"),
        (["novels-gpt"], {"config": "engine: {max_batch_sice: 3}"}, "max_batch_sice"),
        (["novels-gpt"], {"config": "engine: {cache_tokens: 1073741824}"}, "not enough memory"),
        (["novels-gpt"], {"cors": ["*"]}, "every page of the web"),
    ],
)
def test_mistakes_are_user_errors(models: list[str], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    if "config" in options:
        (tmp_path / "config").write_text(options["config"])
        options = {"config": tmp_path / "config"}
    with pytest.raises(UserError, match=message) as error:
        serve(models, port=0, **options)
    assert "\n" not in str(error.value)


def test_a_port_in_use_ends_the_command_with_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = subprocess.run(
            [sys.executable, "-m", "clearhead", "serve", "novels-gpt", "--port", str(taken.getsockname()[1])],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("log_texts", [False, True])
def test_texts_are_logged_only_if_asked_and_keys_never(
    packaged: dict[str, Model], caplog: pytest.LogCaptureFixture, log_texts: bool
) -> None:
    key = "0123456789-secret-key"
    body = {"q": "Two dogs\nsleep.", "source": "en", "target": "de", "api_key": key}
    caplog.set_level("INFO", "clearhead.serve")
    with (
        serving({"en-de": packaged["en-de"]}, Keys([key]), log_texts=log_texts) as running,
        running.client() as client,
    ):
        answer = client.post("/translate", json=body)
        assert client.post("/translate", data=body).status_code == answer.status_code == 200
        client.get("/languages", params={"api_key": key})
    assert "POST /translate 200" in caplog.text
    assert key not in caplog.text
    assert ("Two dogs" in caplog.text) == log_texts
    assert (answer.json()["translatedText"].split()[0] in caplog.text) == log_texts


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_answers_are_sent_without_delay(packaged: dict[str, Model], loop: str) -> None:
    """Nagle's algorithm would hold the body back until the client acknowledges the head: 40 ms."""
    with serving({}, loop=loop) as running, running.client() as client:
        client.get("/health")
        [connection] = running.server.server_state.connections
        opened = connection.transport.get_extra_info("socket")
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_incomplete_heads_are_not_waited_for(packaged: dict[str, Model]) -> None:
    with serving({}, limits={"body_seconds": 0.3}) as running:
        address = ("127.0.0.1", int(running.url.rpartition(":")[2]))
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        with socket.create_connection(address) as silent, socket.create_connection(address) as slow:
            slow.sendall(request + b"\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += slow.recv(4096)
            slow.sendall(request)
            silent.settimeout(3)
            slow.settimeout(3)
            assert silent.recv(10) == b""
            assert slow.recv(10) == b""
        with socket.create_connection(address) as large, contextlib.suppress(ConnectionError):
            for number in range(100):
                large.sendall(b"X-%d: %s\r\n" % (number, b"x" * 1000) if number else request)
            large.settimeout(3)
            assert large.recv(10) == b""
