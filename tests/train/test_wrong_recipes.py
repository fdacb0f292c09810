"""Wrong recipes and data: exit code 2, a one-line error with the fix, and nothing on disk."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch._inductor import config as inductor

from clearhead import cli
from clearhead.config.recipe import Recipe, dump_recipe, load_recipe, recipe_names, recipe_text
from clearhead.errors import ConfigError, UserError
from tests.checkpoint.small_models import contents
from tests.train.tiny import FAMILIES, SYMBOLS, TRAIN, recipe, run


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, without corpora."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one-line error of `clearhead train` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["clearhead", "train", *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
    captured = capsys.readouterr()
    assert exited.value.code == 2, captured.err
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("clearhead: ")]
    assert "Traceback" not in captured.err
    return line.removeprefix("clearhead: ")


def write(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(settings))
    return str(file)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coppy"], "recipe: no recipe 'coppy'; did you mean copy?"),
        (["nowhere/mine.yaml"], "nowhere/mine.yaml does not exist; check the path"),
        (["copy", "train.stepz=5"], "copy: train.stepz: unknown setting; did you mean steps?"),
        (["copy", "trane.steps=5"], "copy: trane: unknown setting; did you mean train?"),
        (["copy", "model.haeds=5"], "copy: model: haeds: unknown setting; did you mean heads?"),
        (["copy", "train.steps=many"], "copy: train.steps: 'many' is not a whole number; write it like 8"),
        (["copy", "train.lr=-1"], "copy: train.lr: -1 is too small; use more than 0"),
        (["copy", "train.precision=int8"], "copy: train.precision: int8 is for inference only; train with fp32, bf16"),
        (["copy", "train.precision=int4"], "copy: train.precision: int4 is for inference only; train with fp32, bf16"),
        (["copy", "train.precision=half"], "copy: train.precision: 'half' is not allowed; use auto, fp32, bf16"),
        (["copy", "train.steps"], "'train.steps': expected key=value"),
        (["copy", "model.vocab_size=50"], "copy: model.vocab_size: is derived from the tokenizer"),
        (["copy", "model.outputs=[tags]"], "copy: model.outputs: is derived from"),
        (["copy", "model.preset=tiny-gpt"], "copy: model.family: decoder, but translation needs encoder-decoder"),
        (
            ["copy", "data.max_length=5000"],
            "data.max_length: 5000 tokens, but the model has 256 positions; lower it",
        ),
        (["novels-bert", "train.metric=bleu"], "train.metric: bleu is not available here; use loss or accuracy"),
        (["copy", "train.eval_samples=0"], "train.metric: exact is not available here; use loss or accuracy"),
        (["novels-llama", "train.metric=bleu"], "train.metric: bleu is not available here; use loss or accuracy"),
        (["novels-llama", "train.patience=3", "data.held_out=0"], "train.patience: there is no validation data"),
        (
            ["novels-llama", "train.scheduled_sampling.decay_steps=5"],
            "train.scheduled_sampling: scheduled sampling is for translation",
        ),
        (
            ["copy", "train.average_checkpoints=5"],
            "copy: train: average_checkpoints: 5 checkpoints, but only 3 are kept; raise keep_checkpoints",
        ),
        (["copy", "--device", "cuda"], "device: cuda was requested, but torch sees no GPU here; use cpu"),
        (["copy", "--device", "abacus"], "device: 'abacus' is not a device; use auto, cpu, cuda or cuda:0"),
        (["copy", "--device", "mps"], "device: mps was requested, but torch sees no Apple GPU here; use cpu"),
        (
            ["multi30k-en-de"],
            "multi30k/train.en.gz does not exist; run: clearhead data multi30k, or set CLEARHEAD_DATA ",
        ),
        (["multi30k-en-de"], "it is published at https://github.com/multi30k/dataset"),
        (["copy", "--seed", "-1"], "Invalid value for '--seed'"),
    ],
)
def test_a_wrong_command_is_a_one_line_error_and_changes_nothing(
    arguments: list[str], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in error_of(capsys, *arguments)
    assert not list(workdir.iterdir())


def test_compiling_without_a_compiler_is_a_one_line_error(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    message = "train.compile: there is no C++ compiler (no-such-compiler); install one, or use train.compile=off"
    assert error_of(capsys, "copy", "train.compile=on", "--device", "cpu") == message
    assert not list(workdir.iterdir())


SMALL = FAMILIES["translator"] | {"train": TRAIN}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": SMALL["data"] | {"valid": {"format": "parallel", "files": ["empty.txt", "empty.txt"]}}},
            "empty.txt is empty; give a file with content",
        ),
        (
            {"data": SMALL["data"] | {"valid": SYMBOLS | {"count": 9, "max_length": 40, "min_length": 30}}},
            "data: no samples in symbols (left out: 9 too long)",
        ),
        (
            {"data": SMALL["data"] | {"valid": {"format": "parallel", "files": ["missing.en", "missing.de"]}}},
            "missing.en does not exist; check the path, put it under data/missing.en, or set CLEARHEAD_DATA",
        ),
        (
            {"train": TRAIN | {"freeze": ["encodr.*"]}},
            "freeze: 'encodr.*' matches no parameter; did you mean enc",
        ),
        ({"train": TRAIN | {"freeze": ["*"]}}, "freeze: nothing would be left to train; remove a pattern"),
        ({"model": {"init_from": "nothing"}}, "no model 'nothing': neither a folder nor a name"),
        ({"model": {"init_from": "x", "dim": 8}}, "model: init_from fixes the architecture"),
        ({"model": {"init_from": "x", "pooling": "max"}}, "pooling"),
        ({"model": {"init_from": "x", "dropout": 2}}, "dropout"),
    ],
)
def test_a_wrong_file_is_a_one_line_error_and_changes_nothing(
    change: dict[str, Any], message: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workdir / "empty.txt").write_text("")
    name = write(workdir, SMALL | change)
    before = contents(workdir)
    assert message in error_of(capsys, name, "--out", "run")
    assert contents(workdir) == before


@pytest.fixture
def stopped(workdir: Path) -> str:
    """A run of four steps in `run`, and the file with its recipe."""
    run(workdir / "run", recipe("translator", steps=4))
    return write(workdir, yaml.safe_load(dump_recipe(recipe("translator", steps=10))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run exists already; continue with --resume, or choose another --out"),
        (["--resume", "train.lr=0.5"], "was started with other settings (train.lr: 0.01 is now 0.5); use the same"),
        (
            ["--resume", "model.dim=32", "train.seed=1"],
            "(model.dim: 16 is now 32; train.seed: 0 is now 1); use the same, or start another run",
        ),
        (["--resume", "data.batch_tokens=99"], "(data.batch_tokens: 240 is now 99)"),
        (["--resume", "data.valid=[{format: symbols, count: 7, split: valid}]"], "(data.valid.0.count: 12 is now 7"),
        (["--resume", "train.steps=3"], "train.steps: 3 is the total, and run is at 4; raise it"),
        (["--resume", "train.steps=4"], "train.steps: 4 is the total, and run is at 4; raise it"),
        (["--out", "mine.yaml"], "mine.yaml exists already and is not a run; choose another --out"),
        (["--out", "mine.yaml", "--resume"], "mine.yaml exists already and is not a run; choose another --out"),
        (["--out", ".", "--resume"], ". exists already and is not a run; choose another --out"),
    ],
)
def test_a_resume_with_other_settings_is_refused(
    arguments: list[str], message: str, stopped: str, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(workdir)
    assert message in error_of(capsys, stopped, "--out", "run", *arguments)
    assert contents(workdir) == before


def test_another_vocabulary_is_refused(workdir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The corpus changed in place, and with it the tokenizer trained on it."""
    texts = ["the cat sat on the mat", "a dog ran to the house"] * 20
    (workdir / "text.txt").write_text("\n".join(texts))
    data = {"task": "language-model", "train": {"files": "text.txt"}, "max_length": 8, "batch_tokens": 64}
    settings = FAMILIES["gpt"] | {"data": data, "train": TRAIN | {"steps": 4}}
    run(workdir / "run", Recipe.build(settings))
    (workdir / "text.txt").write_text("\n".join(texts).replace("cat", "zebra"))
    before = contents(workdir)
    message = error_of(capsys, write(workdir, settings), "train.steps=8", "--out", "run", "--resume")
    (workdir / "mine.yaml").unlink()
    assert "run: the vocabulary is not the one this run started with; restore the data" in message
    assert contents(workdir) == before


def test_a_model_folder_that_cannot_do_the_task_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "gpt", recipe("gpt", steps=1))
    folder = {"init_from": str(tmp_path / "gpt" / "last")}
    wrong = FAMILIES["translator"] | {"model": folder, "train": TRAIN}
    with pytest.raises(ConfigError, match=r"model\.family: decoder, but translation needs encoder-decoder"):
        run(tmp_path / "out", Recipe.build(wrong))
    long = {"model": folder, "train": TRAIN, "data": FAMILIES["gpt"]["data"] | {"max_length": 65}}
    with pytest.raises(ConfigError, match=r"data\.max_length: 65 tokens, but the model has 64 positions; lower it$"):
        run(tmp_path / "out", Recipe.build(long))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_starts_with_a_description(name: str) -> None:
    made = load_recipe(name)
    first = recipe_text(name).splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 20
    assert Recipe.build(yaml.safe_load(dump_recipe(made))) == made, "resolved settings round-trip"


def test_the_recipes_of_the_design_exist() -> None:
    expected = "copy reverse mini-en-de mini-en-zh mini-zh-en multi30k-en-de tatoeba-en-de tatoeba-de-en tatoeba-zh-en"
    expected += " shakespeare-chars shakespeare-chars-cpu wikitext2-gpt novels-llama novels-bert"
    assert set(expected.split()) <= set(recipe_names())


def test_separate_vocabularies_are_never_tied() -> None:
    made = recipe("translator", "tokenizer.joint=false")
    assert made.architecture((12, 12)).tie == "output"
    assert recipe("translator").architecture((12,)).tie == "all"


@pytest.mark.parametrize(
    ("alias", "name"), [("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"), ("float64", "fp64")]
)
def test_precision_takes_torch_dtype_names(alias: str, name: str) -> None:
    assert recipe("gpt", f"train.precision={alias}") == recipe("gpt", f"train.precision={name}")
    assert recipe("gpt", f"train.precision={alias}").train.precision == name


def test_train_raises_user_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists already"):
        run(tmp_path / "file", recipe("gpt"))
