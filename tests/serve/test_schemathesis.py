"""Requests made from the OpenAPI document: valid, invalid and stateful; CLEARHEAD_API_EXAMPLES sets how many."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.predict import Model
from tests.serve.running import serving

EXAMPLES = int(os.environ.get("CLEARHEAD_API_EXAMPLES", "3"))
CONFIG = """\
[phases.examples]
enabled = false
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "400", "404", "408", "413", "429"]
[checks.negative_data_rejection]
expected-statuses = ["400", "404", "405", "408", "413", "415", "429"]
"""


def test_answers_match_the_document(packaged: dict[str, Model], tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with serving(packaged, limits={"max_new_tokens": 64}) as running:
        program = [sys.executable, "-c", "from schemathesis.cli import schemathesis as run; run()"]
        options = [
            "--max-examples",
            str(EXAMPLES),
            "--request-timeout",
            "10",
            "--seed",
            "1",
            "--suppress-health-check",
            "all",
        ]
        options += ["--exclude-path-regex", "^/inspect"]  # these are described by hand
        if EXAMPLES < 10:
            options += ["--phases", "fuzzing"]
        done = subprocess.run(
            [*program, "run", f"{running.url}/openapi.json", *options], capture_output=True, text=True, cwd=tmp_path
        )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
