"""The examples of docs/serve run against the server; its tables, the dashboard and the unit name what exists."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from clearhead.cli import app
from clearhead.cli.serve import _settings
from clearhead.config.serve import ServeConfig, ServeLimits
from tests.serve.running import Running

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.M | re.S)


CURL = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl ")]


@pytest.mark.parametrize("command", CURL)
def test_curl_examples_run(running: Running, command: str) -> None:
    command = command.replace(ADDRESS, running.url).replace("curl -s", "curl -sS --fail-with-body", 1)
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.rstrip().splitlines()[-1]
    assert last == "data: [DONE]" or json.loads(last)


@pytest.mark.parametrize("snippet", blocks("python"))
def test_python_examples_run(running: Running, snippet: str) -> None:
    code = snippet.replace(ADDRESS, running.url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_every_setting_and_route_is_in_the_tables(running: Running) -> None:
    listed = set(re.findall(r"`([\w.]+)`", PAGE))
    for name in ServeConfig.model_fields:
        assert name in {*listed, "limits", "engine"}
    for name, field in ServeLimits.model_fields.items():
        assert f"limits.{name}" in listed
        [row] = [line for line in PAGE.splitlines() if line.startswith("|") and f"`limits.{name}`" in line]
        assert f"{field.default:,}" in row
    for path in running.app.openapi()["paths"]:
        assert f"`{path}`" in PAGE or path.startswith(("/inspect", "/v1/models/"))


def test_the_dashboard_and_the_page_name_metrics_that_exist(running: Running) -> None:
    with running.client() as client:
        client.post("/v1/completions", json={"prompt": "It", "max_tokens": 1})
        text = client.get("/metrics").text
    exist = {name for name in re.findall(r"^(clearhead_\w+)", text, flags=re.M) if not name.endswith("_created")}
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exist}
    queries = [
        target["expr"]
        for panel in json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
        for target in panel["targets"]
    ]
    used = {name for query in queries for name in re.findall(r"clearhead_\w+", query)}
    assert used <= exist
    assert set(re.findall(r"`(clearhead_\w+)`", PAGE)) == named


def test_the_unit_and_the_image_start_the_command() -> None:
    unit = (ROOT / "deploy" / "clearhead.service").read_text()
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    [started] = re.findall(r"^ExecStart=(.*)$", unit, flags=re.M)
    commands = [shlex.split(started)[1:], ["serve", *json.loads(re.findall(r"^CMD (.*)$", image, flags=re.M)[-1])]]
    for arguments in commands:
        name, *rest = arguments
        command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
        given = command.make_context(name, rest).params
        assert given["models"] == ["novels-gpt", "en-de", "novels-bert"]
        assert given["api_keys"]
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", image, flags=re.M):
        assert all((ROOT / name).exists() for name in source.split())
    assert _settings(ROOT / "deploy" / "serve.yaml", {}).limits.max_new_tokens == 1024
    [patience] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.M)
    assert int(patience) > ServeConfig().grace_seconds
