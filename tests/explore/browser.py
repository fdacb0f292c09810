"""A real browser on a server in this process: pages that collect errors and foreign requests, and what they show."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import uvicorn

from clearhead.predict import Model
from clearhead.serve.app import create_app

REQUIRED = "CLEARHEAD_REQUIRE_BROWSER"  # set where a missing browser is an error
FULL = os.environ.get("CLEARHEAD_BROWSER") == "full"  # every view × family × language × width × theme
FOLDER = os.environ.get("CLEARHEAD_SCREENSHOTS")  # where screenshots are kept
AXE = """async () => {
  const runOnly = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"];
  const { violations } = await axe.run(document, { runOnly });
  const places = (nodes) => nodes.slice(0, 3).map((n) => `${n.target} ${n.failureSummary}`).join("; ");
  return violations.map((v) => `${v.id}: ${places(v.nodes)}`);
}"""


def chromium() -> str:
    """The path of a Chromium; the test is skipped where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        found = None
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but chromium or playwright is not installed")
        pytest.skip("chromium (Debian: apt-get install chromium fonts-noto-cjk) or playwright is not installed")
    return found


class Server:
    """uvicorn on a thread; it can be stopped and started again on the same port."""

    def __init__(
        self,
        models: Mapping[str, Model],
        prepare: Callable[[Any], None] = lambda app: None,
        create: Callable[[Any], Any] = create_app,
    ):
        self.models, self.prepare, self.create = models, prepare, create
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        self.start()

    def start(self) -> None:
        """Start, and wait until it listens."""
        app = self.create(self.models)
        self.prepare(app)
        config = uvicorn.Config(app, port=self.port, log_level="critical")
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 30
        while not self.uvicorn.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop at once, whatever is connected."""
        self.uvicorn.should_exit = self.uvicorn.force_exit = True
        self.thread.join(30)


class Shown:
    """A page of the server: what went wrong in it, and what it shows."""

    def __init__(self, page: Any, url: str):
        self.page, self.url = page, url
        self.problems: list[str] = []
        self.foreign: list[str] = []
        page.on("console", lambda message: self._console(message))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", lambda request: self._request(request.url))

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _request(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(url)

    def open(self, **state: Any) -> None:
        """Show a state of the page, and wait until nothing is being computed."""
        self.page.goto("about:blank")
        self.page.goto(self.url + "#" + urlencode({key: str(value) for key, value in state.items()}))
        self.settle()

    def settle(self) -> None:
        """Wait until the view is there and complete."""
        self.page.wait_for_selector(".view h2", timeout=30_000)
        self.page.wait_for_timeout(60)
        self.page.wait_for_function(
            "() => !document.querySelector('.waiting, .stale') || document.querySelector('.problem')",
            timeout=30_000,
        )

    def text(self, selector: str) -> str:
        """The text of the first element."""
        return re.sub(r"\s+", " ", self.page.locator(selector).first.inner_text()).strip()

    def number(self, selector: str) -> str:
        """The text of a number, with an ASCII minus."""
        return self.text(selector).replace("\u2212", "-")

    def keep(self, name: str) -> None:
        """Keep a screenshot where that is asked for."""
        if FOLDER:
            Path(FOLDER).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(FOLDER) / f"{name}.png"), full_page=True)

    def violations(self) -> list[str]:
        """What axe-core finds."""
        import axe_playwright_python

        script = Path(axe_playwright_python.__file__).with_name("axe.min.js").read_text("utf-8")
        self.page.evaluate(f"() => {{ if (!window.axe) {{ {script} }} }}")
        found = self.page.evaluate(AXE)
        return list(found)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


def shown(running: Any, url: str, *, width: int = 1280, theme: str = "light", language: str = "en") -> Shown:
    """A new page with its own storage."""
    context = running.new_context(
        viewport={"width": width, "height": 900},
        color_scheme=theme,
        locale={"en": "en-US", "zh": "zh-CN"}[language],
        reduced_motion="reduce",
        accept_downloads=True,
    )
    return Shown(context.new_page(), url)
