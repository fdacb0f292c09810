"""`info`, `models` and `chat` as a user sees them; `clearhead --help` and `import clearhead` do without torch."""

import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import clearhead
from tests.cli.forked import calls
from tests.cli.models import make, start


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verbs")
    make(folder / "gpt", "tiny-gpt")
    make(folder / "runs" / "one" / "best", "tiny-translator", scores=True)
    make(folder / "runs" / "two" / "last", "tiny-encoder")
    (make(folder / "runs" / "worn" / "last", "tiny-gpt") / "model.safetensors").write_bytes(b"")
    (folder / "runs" / "empty").mkdir()
    return folder


def test_info_says_what_a_model_is(place: Path) -> None:
    (code, text, errors), (_, data, _), (_, bert, _) = calls(
        [(["info", "runs/one"], b""), (["info", "runs/one", "--json"], b""), (["info", "runs/two", "--json"], b"")],
        place,
    )
    assert (code, errors) == (0, "")
    model, facts = clearhead.load(place / "runs" / "one", "cpu"), json.loads(data)
    assert facts["parameters"] == sum(facts["parts"].values()) == sum(p.numel() for p in model.network.parameters())
    assert facts["parts"]["decoder cross-attention"] == 2 * (4 * 16 * 17 + 2 * 16)
    assert facts["file_bytes"] == (place / "runs/one/best/model.safetensors").stat().st_size
    assert facts["stored_as"] == "float32"
    assert facts["can"] == ["translate", "evaluate"]
    assert json.loads(bert)["can"] == ["fill", "embed", "evaluate"]
    assert facts["tokenizers"][0]["tokens"] == len(model.tokenizer)
    assert facts["scores"] == [
        {"metric": "BLEU", "value": 31.4, "data": "a test set", "signature": "nrefs:1|case:mixed"}
    ]
    assert facts["architecture"]["dim"] == 16
    for line in ("Translates little.", "steps: 7", "Apache-2.0", "BLEU 31.4 on a test set (nrefs:1|case:mixed)"):
        assert line in text
    assert f"{facts['parameters']:,}" in text


def test_models_lists_runs_with_what_they_are_for_and_names_damage(place: Path) -> None:
    (code, text, _), (_, data, _) = calls([(["models"], b""), (["models", "--json"], b"")], place)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(data) if row["place"] == "runs"}
    assert list(rows) == ["runs/one", "runs/two", "runs/worn"]
    assert rows["runs/one"]["for"] == "Translates little."
    assert rows["runs/one"]["score"] == "BLEU 31.4"
    assert rows["runs/two"]["for"] == "masked-language-model"
    assert Path(rows["runs/two"]["folder"]).name == "last"
    assert "cannot be read as safetensors" in rows["runs/worn"]["problem"]
    assert len(text.splitlines()) == 1 + len(json.loads(data))


def test_chat_through_a_pipe_answers_line_by_line(place: Path) -> None:
    talk = b"hello there\n/system a man\n\nthe dog\n/reset\nthe dog\n/what\n/help\n/quit\nnever\n"
    arguments = ["chat", "gpt", "--max-new-tokens", "5", "--seed", "4", "--temperature", "0"]
    [(code, output, errors)] = calls([(arguments, talk)], place)
    assert code == 0
    assert errors.splitlines()[:2] == ["(from the next answer on)", "(forgotten)"]
    assert "no command /what" in errors
    assert errors.count("/reset") == 2
    model = clearhead.load(place / "gpt", "cpu")

    def answer(prompt: str) -> str:
        return model.generate(prompt, max_new_tokens=5, stop=["\nYou:", "\nModel:"])[0][0].text.lstrip()

    first = answer("You: hello there\nModel:")
    second = answer(f"a man\n\nYou: hello there\nModel: {first.strip()}\nYou: the dog\nModel:")
    assert output == f"{first}\n{second}\n{answer('a man' + chr(10) * 2 + 'You: the dog' + chr(10) + 'Model:')}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_ctrl_c_stops_an_answer_and_keeps_the_session(place: Path) -> None:
    import pty

    outside, inside = pty.openpty()
    arguments = ("chat", "gpt", "--max-new-tokens", "100", "--temperature", "1.5")
    child = start(*arguments, cwd=place, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    seen = b""

    def until(text: bytes, interrupt: bool = False) -> None:
        nonlocal seen
        limit = time.monotonic() + 40
        while text not in seen and time.monotonic() < limit:
            if interrupt:  # as a terminal does for Ctrl-C; one that comes while the prompt is drawn has no effect
                os.kill(child.pid, signal.SIGINT)
            if select.select([outside], [], [], 1)[0]:
                try:
                    seen += os.read(outside, 1 << 16)
                except OSError:  # the other side is gone
                    break
        assert text in seen, seen
        seen = seen[seen.index(text) + len(text) :]

    until(b"You: ")
    os.write(outside, b"a man\n")
    until(b"Model: ")
    os.kill(child.pid, signal.SIGINT)
    until(b"You: ")
    until(b"Ctrl-D ends", interrupt=True)
    until(b"You: ")
    os.write(outside, b"/reset\n")
    until(b"(forgotten)")
    os.write(outside, b"/quit\n")
    assert child.wait(30) == 0
    os.close(outside)


def test_help_and_import_do_without_torch_and_pydantic(place: Path) -> None:
    code = (
        "import sys, clearhead\n"
        "clearhead.load\n"
        "sys.argv = ['clearhead', '--help']\n"
        "from clearhead.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    slow = {'torch', 'numpy', 'pydantic', 'tokenizers', 'yaml'} & set(sys.modules)\n"
        "    assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for verb in ("translate", "generate", "chat", "info", "models"):
        assert f" {verb} " in done.stdout


def test_what_can_be_said_to_load_can_be_said_to_the_package() -> None:
    from clearhead.predict import load

    asked = {name: each.default for name, each in inspect.signature(load).parameters.items()}
    assert {name: each.default for name, each in inspect.signature(clearhead.load).parameters.items()} == asked


def test_a_model_is_loaded_by_its_folder_and_does_what_it_is_for(place: Path) -> None:
    model = clearhead.load(place / "runs" / "one", device="cpu")
    assert model.translate(["the dog", ""], beam=4)[1] == ""
    model = clearhead.load(str(place / "gpt"), dtype="float64")
    assert "".join(model.stream("a man", max_new_tokens=9)) == model.generate("a man", max_new_tokens=9)[0][0].text
