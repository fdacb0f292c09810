"""Run the command chain of docs/understand.md with a few steps each: pretrain, fine-tune, use on a file."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from clearhead import cli

TEXT = (Path(__file__).parents[1] / "docs" / "understand.md").read_text(encoding="utf-8")
FEW = ("train.steps=4", "train.warmup=1", "train.validate_every=4", "data.train.count=300", "data.valid.count=40")


def test_the_chain_in_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences, story = re.findall(r"^```(?:sh)?\n(.*?)^```", TEXT, flags=re.M | re.S)[:2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    Path("sentences.txt").write_text(sentences, encoding="utf-8")
    said: dict[str, str] = {}
    for line in story.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "clearhead"
        few = FEW if arguments[0] == "train" else ()
        monkeypatch.setattr(sys, "argv", [program, *arguments, *few])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, errors = capsys.readouterr()
        assert ended.value.code in (0, None), f"{line}: {errors}"
        said[arguments[0]] = out
    count = len(sentences.splitlines())
    assert len(said["classify"].splitlines()) == count
    assert {line.split("\t")[0] for line in said["classify"].splitlines()} <= {"past", "present", "future"}
    assert said["tag"].count("\n\n") == count
    assert re.fullmatch(r".+\t0\.\d{4}\t\d+-\d+\n", said["answer"])
    assert len(said["fill"].split("\t")) == 5
    assert "f1_PERSON" in said["evaluate"]
    assert np.load("vectors.npy").shape == (count, 128)
    assert len(said["similar"].splitlines()) == count
