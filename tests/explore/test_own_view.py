"""The example of a view of one's own: one script and one route, at most 60 lines together with what they import."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastapi.testclient import TestClient

from clearhead.errors import UserError
from clearhead.serve.app import create_app
from clearhead.serve.inspect import add_view
from clearhead.serve.inspect.frame import unframe
from tests.explore.browser import Server, browser, shown
from tests.explore.models import small

FOLDER = Path(__file__).parents[2] / "examples" / "explore_view"
TEXT = "a man sees the dog"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("entropy_view", FOLDER / "entropy.py")
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def lines_of_code() -> int:
    text = "\n".join(path.read_text("utf-8") for path in sorted(FOLDER.glob("entropy.*")))
    skipped = ("//", '"""', "import ", "from ")
    return sum(bool(line.strip()) and not line.lstrip().startswith(skipped) for line in text.splitlines())


def test_the_example_is_short() -> None:
    assert lines_of_code() <= 60


def test_the_route_gives_the_entropy_of_every_head(example: ModuleType) -> None:
    app = create_app({"llama": small("llama")})
    add_view(app, FOLDER / "entropy.js", example.router)
    with TestClient(app) as client:
        assert client.get("/inspect/models").json()["models"][0]["views"][-1] == "entropy"
        assert "export const title" in client.get("/page/views/entropy.js").text
        _, tensors = unframe(client.post("/inspect/entropy", json={"text": TEXT}).content)
        head = {"text": TEXT, "kind": "decoder", "layer": 1, "head": 2}
        _, one = unframe(client.post("/inspect/head", json=head).content)
    p = one["weights"].double()
    bits = -(p * p.clamp(min=1e-30).log2()).sum(-1).mean()
    assert float(tensors["entropy"][1, 2]) == pytest.approx(float(bits), abs=1e-5)
    assert tensors["entropy"].shape == (2, 4)


def test_a_view_needs_a_name_that_is_one(tmp_path: Path) -> None:
    script = tmp_path / "my-view.js"
    script.write_text("")
    with pytest.raises(UserError, match="rename the file"):
        add_view(create_app({"gpt": small("gpt")}), script)


def test_the_page_shows_the_view(example: ModuleType) -> None:
    with browser() as running:
        server = Server({"llama": small("llama")}, lambda app: add_view(app, FOLDER / "entropy.js", example.router))
        try:
            page: Any = shown(running, server.url, language="zh")
            page.open(m="llama", v="entropy", t=TEXT)
            assert page.text("h2") == "熵"
            assert page.page.locator("ol.best li").count() == 8
            assert page.problems == []
        finally:
            server.stop()
