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
    for page in ("notes.html", "notes.zh-CN.html", "checklist.html", "lab.zh-CN.html"):
        text = (tmp_path / page).read_text(encoding="utf-8")
        pattern = r'<(?:script|img|iframe)[^>]*src="(https?:[^"]+)|<link[^>]*stylesheet[^>]*href="(https?:[^"]+)'
        loaded = re.findall(pattern, text)
        assert not loaded, (page, loaded)
    assert (tmp_path / "source/src/clearhead/model/layer.py.txt").exists()
