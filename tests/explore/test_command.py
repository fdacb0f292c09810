"""`clearhead explore` serves the page on this machine."""

import socket
from typing import Any

import pytest
from typer.testing import CliRunner

from clearhead.cli import app
from tests.explore.models import small


def test_explore_serves_the_page_and_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    import clearhead.cli.serve
    import clearhead.serve.server

    answers: dict[str, Any] = {}

    def run(app: Any, listener: socket.socket, config: Any) -> None:
        from fastapi.testclient import TestClient

        with TestClient(app) as client:
            answers["page"] = client.get("/")
            answers["models"] = client.get("/inspect/models").json()
            answers["host"] = config.host
        listener.close()

    monkeypatch.setattr(clearhead.serve.server, "run", run)
    monkeypatch.setattr(clearhead.cli.serve, "load_models", lambda names, *_: {name: small("gpt") for name in names})
    result = CliRunner().invoke(app, ["explore", "first", "second=other", "--no-browser", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert answers["page"].status_code == 200
    assert [each["name"] for each in answers["models"]["models"]] == ["first", "second"]
    assert answers["host"] == "127.0.0.1"


def test_a_port_that_is_taken_is_a_user_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(app, ["explore", "--no-browser", "--port", str(taken.getsockname()[1])])
    assert result.exit_code != 0
    assert "port" in str(result.exception)
