"""`info`, `models` and `chat`; `clearhead --help` and `import clearhead` without torch."""

import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import clearhead
from clearhead import cli
from clearhead.checkpoint import load_model, save_model
from clearhead.config import preset
from clearhead.model import build
from clearhead.ops.native.structs import step_library
from clearhead.text import train as train_tokenizer
from tests.cli.forked import calls
from tests.cli.models import make, start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    make(folder / "gpt", "tiny-gpt")
    make(folder / "runs" / "one" / "best", "tiny-translator", scores=True)
    make(folder / "runs" / "two" / "last", "tiny-encoder")
    (make(folder / "runs" / "damaged" / "last", "tiny-gpt") / "model.safetensors").write_bytes(b"")
    (folder / "runs" / "empty").mkdir()
    return folder


def test_info_describes_a_model(folder: Path) -> None:
    (code, text, errors), (_, data, _), (_, bert, _) = calls(
        [(["info", "runs/one"], b""), (["info", "runs/one", "--json"], b""), (["info", "runs/two", "--json"], b"")],
        folder,
    )
    assert (code, errors) == (0, "")
    model, info = clearhead.load(folder / "runs" / "one", "cpu"), json.loads(data)
    assert info["parameters"] == sum(info["parts"].values()) == sum(p.numel() for p in model.network.parameters())
    assert info["parts"]["decoder cross-attention"] == 2 * (4 * 16 * 17 + 2 * 16)
    assert info["file_bytes"] == (folder / "runs/one/best/model.safetensors").stat().st_size
    assert info["dtype"] == "fp32"
    assert info["commands"] == ["translate", "evaluate"]
    assert json.loads(bert)["commands"] == ["fill", "embed", "evaluate"]
    assert info["tokenizers"][0]["vocab_size"] == len(model.tokenizer)
    assert info["scores"] == [
        {"metric": "BLEU", "value": 31.4, "data": "a test set", "signature": "nrefs:1|case:mixed"}
    ]
    assert info["architecture"]["dim"] == 16
    for line in ("Translates little.", "steps: 7", "Apache-2.0", "BLEU 31.4 on a test set (nrefs:1|case:mixed)"):
        assert line in text
    assert f"{info['parameters']:,}" in text


def test_info_says_what_a_model_without_a_tokenizer_cannot_do(folder: Path) -> None:
    make(folder / "bare", "tiny-gpt", tokenizers=False)
    [(_, text, _), (_, data, _)] = calls([(["info", "bare"], b""), (["info", "bare", "--json"], b"")], folder)
    assert "missing" in text
    assert "tokenizer.json; without it this model works on token ids only" in text
    assert "cannot generate, chat, evaluate" in text
    assert json.loads(data)["commands"] == []
    expected = "reference (the native step was not compiled, or is turned off)" if step_library() is None else "native"
    assert json.loads(data)["cpu_step"] == expected
    assert re.search(rf"CPU step +{re.escape(expected)}\n", text)


def test_info_shows_special_tokens_languages_template_and_sampling(folder: Path) -> None:
    base = load_model(make(folder / "special", "tiny-gpt"))
    begin, end = (base.tokenizers[0].id(role) for role in ("begin", "end"))
    extra = {"begin": [begin], "eos_ids": [end, begin], "chat_template": "{{ messages }}", "src_lang": "eng_Latn"}
    extra |= {"languages": {"eng_Latn": 3, "deu_Latn": 4}, "sampling": {"temperature": 0.6, "top_p": 0.9}}
    save_model(folder / "special", base.network, base.tokenizers, extra)
    [(code, text, _), (_, data, _)] = calls([(["info", "special"], b""), (["info", "special", "--json"], b"")], folder)
    assert code == 0
    names = [base.tokenizers[0].id_to_token(number) for number in (begin, end)]
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines() if not line.startswith(" "))
    assert lines["begins with"] == names[0]
    assert lines["ends at"] == f"{names[1]}, {names[0]}"
    assert lines["languages"] == "2: eng_Latn, deu_Latn"
    assert "default eng_Latn → ?" in text
    assert lines["chat"] == "chat template"
    assert lines["sampling"] == "temperature 0.6, top_p 0.9"
    assert json.loads(data)["eos"] == [names[1], names[0]]


def test_info_has_no_parentheses_for_a_tokenizer_without_roles(folder: Path) -> None:
    tokens = train_tokenizer(["a b c"] * 9, "byte-bpe", 260, roles=())
    save_model(folder / "plain", build(preset("tiny-gpt", [f"vocab_size={len(tokens)}"])), tokens)
    [(code, text, errors)] = calls([(["info", "plain"], b"")], folder)
    assert code == 0, errors
    assert re.search(r"^tokenizer +\w+, \d+ tokens$", text, re.M)


def test_a_number_that_is_none_is_named(folder: Path) -> None:
    options = (["--max-new-tokens", "abc"], ["--temperature", "hot"])
    results = calls([(["generate", "gpt", "a", *option], b"") for option in options], folder)
    assert [code for code, _, _ in results] == [2, 2]
    for (name, value), (_, _, errors) in zip(options, results, strict=True):
        assert errors.startswith(f"clearhead: Invalid value for '{name}': Input should be a valid ")
        assert f": '{value}'. See clearhead generate --help" in errors


def test_only_options_that_are_near_are_suggested(folder: Path) -> None:
    suggested = {"--formt": "--format", "--temp": "--temperature", "--model": "", "--size": ""}
    results = calls([(["generate", "m", name, "x"], b"") for name in suggested], folder)
    for (name, option), (_, _, errors) in zip(suggested.items(), results, strict=True):
        near = f" (Possible options: {option})" if option else ""
        assert errors == f"clearhead: No such option: {name}{near}. See clearhead generate --help\n"


def test_models_lists_runs_with_descriptions_and_problems(folder: Path) -> None:
    (code, text, _), (_, data, _) = calls([(["models"], b""), (["models", "--json"], b"")], folder)
    assert code == 0
    rows = {row["name"]: row for row in json.loads(data) if row["source"] == "runs"}
    assert list(rows) == ["runs/damaged", "runs/one", "runs/two"]
    assert rows["runs/one"]["description"] == "Translates little."
    assert rows["runs/one"]["score"] == "BLEU 31.4 on a test set"
    assert rows["runs/two"]["description"] == "masked-language-model"
    assert Path(rows["runs/two"]["folder"]).name == "last"
    assert "cannot be read as safetensors" in rows["runs/damaged"]["problem"]
    assert len(text.splitlines()) == 1 + len(json.loads(data))


def test_generate_with_a_draft_prints_the_same_text(folder: Path) -> None:
    arguments = ["generate", "gpt", "a man", "--max-new-tokens", "8", "--temperature", "0"]
    plain, lookup, model, refused = calls(
        [
            (arguments, b""),
            ([*arguments, "--draft", "prompt-lookup"], b""),
            ([*arguments, "--draft", "gpt"], b""),
            (["generate", "gpt", "--draft", "gpt"], b"a man\n"),
        ],
        folder,
    )
    assert plain[0] == 0
    assert plain[1] == lookup[1] == model[1]
    assert refused[0] == 2
    assert "--draft: needs a PROMPT" in refused[2]


def test_chat_through_a_pipe_answers_line_by_line(folder: Path) -> None:
    turns = b"hello there\n/system a man\n\nthe dog\n/reset\nthe dog\n/what\n/help\n/quit\nnever\n"
    arguments = ["chat", "gpt", "--max-new-tokens", "5", "--seed", "4", "--temperature", "0"]
    [(code, output, errors)] = calls([(arguments, turns)], folder)
    assert code == 0
    assert errors.splitlines()[:2] == ["(system prompt set)", "(conversation cleared)"]
    assert "unknown command /what" in errors
    assert errors.count("/reset") == 2
    model = clearhead.load(folder / "gpt", "cpu")

    def answer(prompt: str) -> str:
        return model.generate(prompt, max_new_tokens=5, stop=["\nYou:", "\nModel:"]).text.lstrip()

    first = answer("You: hello there\nModel:")
    second = answer(f"a man\n\nYou: hello there\nModel: {first.strip()}\nYou: the dog\nModel:")
    assert output == f"{first}\n{second}\n{answer('a man' + chr(10) * 2 + 'You: the dog' + chr(10) + 'Model:')}\n"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(folder: Path) -> None:
    import pty

    terminal, child_end = pty.openpty()
    arguments = ("chat", "gpt", "--max-new-tokens", "100", "--temperature", "1.5")
    child = start(*arguments, cwd=folder, stdin=child_end, stdout=child_end, stderr=child_end, start_new_session=True)
    os.close(child_end)
    received = b""

    def read_until(text: bytes, interrupt: bool = False) -> None:
        nonlocal received
        limit = time.monotonic() + 40
        while text not in received and time.monotonic() < limit:
            if interrupt:  # like Ctrl-C; has no effect while the prompt is drawn
                os.kill(child.pid, signal.SIGINT)
            if select.select([terminal], [], [], 1)[0]:
                try:
                    received += os.read(terminal, 1 << 16)
                except OSError:  # the child has exited
                    break
        assert text in received, received
        received = received[received.index(text) + len(text) :]

    read_until(b"You: ")
    os.write(terminal, b"a man\n")
    read_until(b"Model: ")
    os.kill(child.pid, signal.SIGINT)
    read_until(b"You: ")
    read_until(b"Ctrl-D exits", interrupt=True)
    read_until(b"You: ")
    os.write(terminal, b"/reset\n")
    read_until(b"(conversation cleared)")
    os.write(terminal, b"/quit\n")
    assert child.wait(30) == 0
    os.close(terminal)


def test_help_and_import_need_neither_torch_nor_pydantic(folder: Path) -> None:
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
    for command in ("translate", "generate", "chat", "info", "models"):
        assert f" {command} " in done.stdout


def test_clearhead_load_has_the_parameters_of_predict_load() -> None:
    from clearhead.predict import load

    expected = {name: each.default for name, each in inspect.signature(load).parameters.items()}
    assert {name: each.default for name, each in inspect.signature(clearhead.load).parameters.items()} == expected


def test_load_finds_a_model_by_its_folder(folder: Path) -> None:
    model = clearhead.load(folder / "runs" / "one", device="cpu")
    assert model.translate(["the dog", ""], beam=4)[1].text == ""
    model = clearhead.load(str(folder / "gpt"), dtype="float64")
    assert "".join(model.stream("a man", max_new_tokens=9)) == model.generate("a man", max_new_tokens=9).text


def test_a_user_without_a_home_needs_a_cache_only_to_write_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "CLEARHEAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.chdir(folder)
    for arguments, code in ((["models"], 0), (["info", "gpt"], 0), (["pull", "minilm"], 2)):
        assert run_main(monkeypatch, arguments) == code
    assert capsys.readouterr().err == (
        "clearhead: the cache folder is unknown, as this user has no home; set CLEARHEAD_CACHE\n"
    )


def test_ctrl_c_that_a_library_turns_into_an_error_is_still_ctrl_c(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def swallow(name: str) -> Path:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("an error of the library") from None
        raise AssertionError

    monkeypatch.setattr("clearhead.predict.find_model", swallow)
    assert run_main(monkeypatch, ["info", "gpt"]) == 130
    assert capsys.readouterr() == ("", "")


def run_main(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> int:
    """Run the command line in this process; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["clearhead", *arguments])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)
    return int(stop.value.code or 0)
