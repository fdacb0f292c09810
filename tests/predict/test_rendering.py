"""The process that renders chat templates: confined, numbered answers, ended with its parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from clearhead.errors import UserError
from clearhead.predict.template import Renderer

SLOW = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{{ a }}"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def renderer() -> Iterator[Renderer]:
    renderer = Renderer()
    assert renderer.render("{{ a }}", {"a": 0}) == "0"
    yield renderer
    renderer.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs an interval timer")
@pytest.mark.parametrize("seconds", [0.002, 0.1, 0.3])
def test_the_request_after_an_interruption_has_its_own_answer(renderer: Renderer, seconds: float) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with pytest.raises(KeyboardInterrupt):
            renderer.render(SLOW, {"a": "stale"})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert renderer.render("{{ a }}", {"a": "fresh"}) == "fresh"


def test_an_answer_of_another_number_is_refused(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "_request", lambda line: json.dumps({"number": 1, "text": "stale"}))
    with pytest.raises(UserError, match="chat template cannot be used"):
        renderer.render("{{ a }}", {"a": 1})
    monkeypatch.undo()
    assert renderer.render("{{ a }}", {"a": "fresh"}) == "fresh"


@linux
def test_the_process_has_no_files_no_environment_and_no_terminal(renderer: Renderer, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        renderer.close()
        assert renderer.render("{{ a }}", {"a": 1}) == "1"
        assert renderer._process is not None
        folder = Path(f"/proc/{renderer._process.pid}")
        assert sorted(path.name for path in (folder / "fd").iterdir()) == ["0", "1", "2"]
    names = {entry.partition("=")[0] for entry in (folder / "environ").read_text().split("\0")}
    assert names <= {"", "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert (folder / "cwd").readlink() == Path("/")
    assert os.getsid(renderer._process.pid) == renderer._process.pid
    limits = {line[:26].strip(): line[26:].split()[:2] for line in (folder / "limits").read_text().splitlines()}
    for name in ("Max file size", "Max processes", "Max core file size"):
        assert limits[name] == ["0", "0"]
    assert limits["Max address space"] == [str(1 << 29)] * 2


@linux
def test_a_template_does_not_outlive_a_killed_parent() -> None:
    code = (
        "from clearhead.predict.template import Renderer\n"
        "renderer = Renderer(1.0)\n"
        "renderer.render('{{ a }}', {'a': 1})\n"
        "print(renderer._process.pid, flush=True)\n"
        "renderer.render('{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
        "{% endfor %}{% endfor %}{% endfor %}', {})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = Path(f"/proc/{int(parent.stdout.readline())}")
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    limit = time.monotonic() + 20
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2] and time.monotonic() < limit:
        time.sleep(0.05)
    assert time.monotonic() < limit
