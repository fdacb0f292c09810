"""No command replaces a file or folder unless --force is given."""

from pathlib import Path

import pytest

from clearhead.checkpoint import save_model
from tests.cli.forked import calls
from tests.cli.models import TEXT, make
from tests.predict.task_models import task_model

pytest.importorskip("onnx", reason="onnx is not installed")

COMMANDS = {
    "embed embed cat --out out.npy": "out.npy",
    "translate tr --file text.txt --beam 1 --out out.txt": "out.txt",
    "classify classify cat --out out.csv": "out.csv",
    "generate gpt --file text.txt --max-new-tokens 1 --out out.jsonl": "out.jsonl",
    "tokenizer train text.txt --out tokens": "tokens/tokenizer.json",
    "tokenizer stats tokens --file text.txt --plot out.svg": "out.svg",
    "word2vec train text.txt --out vectors --epochs 1 --dim 4": "vectors/vectors.safetensors",
    "word2vec export vectors out.vec": "out.vec",
    "export gpt exported --to onnx": "exported/model.onnx",
    "import hf imported": "imported/model.safetensors",
    "new reviews.csv --out out.yaml": "out.yaml",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overwriting")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    for name, head in {"embed": "", "classify": "classes"}.items():
        model = task_model(head)
        save_model(folder / name, model.network, model.tokenizers, model.extra)
    (folder / "text.txt").write_text(f"{TEXT}\n" * 50)
    reviews = "".join(f"I have seen film number {n} twice,{n % 2}\n" for n in range(40))
    (folder / "reviews.csv").write_text(f"text,label\n{reviews}")
    return folder


def test_every_writer_refuses_what_exists_without_force(folder: Path) -> None:
    from clearhead.checkpoint import load_model
    from clearhead.checkpoint.formats import export_model

    export_model(load_model(folder / "embed"), folder / "hf", "hf")
    commands = list(COMMANDS)
    ways = [[*command.split(), *more] for more in ([], [], ["--force"]) for command in commands]
    results = calls([(arguments, b"") for arguments in ways], folder)
    first, again, forced = (results[n : n + len(commands)] for n in range(0, len(results), len(commands)))
    for number, (command, target) in enumerate(COMMANDS.items()):
        assert first[number][0] == 0, (command, first[number][2])
        code, _, errors = again[number]
        assert (code, errors.count("\n")) == (2, 1), (command, errors)
        assert "already exists" in errors
        assert "--force" in errors
        assert forced[number][0] == 0, (command, forced[number][2])
        assert (folder / target).stat().st_size


def test_force_does_not_replace_folders_of_others(folder: Path) -> None:
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.txt").write_text("years of work")
    [(code, _, errors)] = calls([(["export", "gpt", "thesis", "--to", "onnx", "--force"], b"")], folder)
    assert code == 2
    assert "thesis has no manifest.json, so it is not a model of ours; give a new folder" in errors
    assert [path.name for path in (folder / "thesis").iterdir()] == ["chapter.txt"]
