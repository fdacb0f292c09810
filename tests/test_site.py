"""The site builds without a network and with every link and anchor checked."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_site_builds_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed; pip install '.[docs]'")
    pytest.importorskip("material", reason="mkdocs-material is not installed; pip install '.[docs]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    def page_text(name: str) -> str:
        return (tmp_path / name).read_text(encoding="utf-8")

    for page in ("notes.html", "notes.zh-CN.html", "checklist.html", "lab.zh-CN.html"):
        text = page_text(page)
        pattern = r'<(?:script|img|iframe)[^>]*src="(https?:[^"]+)|<link[^>]*stylesheet[^>]*href="(https?:[^"]+)'
        loaded = re.findall(pattern, text)
        assert not loaded, (page, loaded)
    (link,) = set(re.findall(r'href="(source/src/clearhead/model/layer\.py\.html)#(L\d+)"', page_text("notes.html")))
    assert f'<span id="{link[1]}">' in (tmp_path / link[0]).read_text(encoding="utf-8")
