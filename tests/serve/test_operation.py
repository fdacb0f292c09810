"""Metrics and documentation, draining, restarts and the command."""

import re
from typing import Any

from clearhead.predict import Model
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
