"""User errors about models and texts: one line on stderr, exit code 2, nothing on stdout."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.forked import calls
from tests.cli.models import clearhead, make

TRANSLATE, GENERATE, STOP = "translate tr", "generate gpt", "--on-error stop"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a model of each family, a run, and damaged models."""
    folder = tmp_path_factory.mktemp("models")
    make(folder / "tr", "tiny-translator")
    make(folder / "gpt", "tiny-gpt")
    make(folder / "bert", "tiny-encoder")
    make(folder / "runs" / "mini-en-de" / "best", "tiny-translator")
    (folder / "empty").mkdir()
    (folder / "file").write_text("x")
    make(folder / "nan", "tiny-gpt", fill=float("nan"))
    make(folder / "untokenized", "tiny-gpt", tokenizers=False)
    (make(folder / "incomplete", "tiny-gpt") / "tokenizer.json").unlink()
    return folder


CASES: list[tuple[str, bytes, str]] = [
    ("translate runs/mini-en-d x", b"", "no model 'runs/mini-en-d'.*did you mean runs/mini-en-de?"),
    ("translate zzz x", b"", "no model 'zzz'.*known: .*runs/mini-en-de"),
    ("info empty", b"", "empty contains no model (config.json"),
    ("info file", b"", "file is a file; give a model folder"),
    ("generate untokenized x", b"", "untokenized has no tokenizer.json"),
    ("generate incomplete x", b"", "tokenizer.json"),
    ("generate nan x", b"", "nan: .* contains NaN or infinity"),
    ("generate bert x", b"", "generate: bert is an encoder; it can"),
    ("chat bert", b"hello\n", "chat: bert is an encoder; it can"),
    ("chat tr", b"hello\n", "chat: tr is an encoder-decoder; it can translate"),
    ("translate gpt x", b"", "translate: gpt is a decoder; it can generate"),
    (f"{GENERATE} x --temperature -1", b"", "--temperature.*greater than or equal to 0"),
    (f"{GENERATE} x --temperature nan", b"", "--temperature"),
    (f"{GENERATE} x --top-p 0", b"", "--top-p.*0"),
    (f"{GENERATE} x --samples 2 --temperature 0", b"", "--samples: 2 identical greedy samples; set a --temperature"),
    (f"{GENERATE} x --max-new-tokens 127", b"", "prompt: 2 tokens and 127 more are requested.*at most 126"),
    (f"{GENERATE} {'x' * 300}", b"", "prompt: 301 tokens.*128 positions; shorten the prompt$"),
    (f"{GENERATE} --max-new-tokens 9 {STOP}", b"fine\n" + b"x" * 130 + b"\n", "standard input, line 2: 131 tokens"),
    (f"{GENERATE} --max-new-tokens 9 {STOP}", b"fine\n\xff\n", "standard input, line 2: not valid UTF-8"),
    (f"{GENERATE} --stream", b"fine\n", "--stream: needs a PROMPT"),
    (f"{GENERATE} x --max-new-tokens 5 --seed 9223372036854775808", b"", "a seed is a 64-bit integer"),
    (f"{GENERATE} x --device cuda:99", b"", "device: cuda"),
    (f"{GENERATE} x --device gpu", b"", "'gpu' is not a device"),
    (f"{GENERATE} x --dtype float3", b"", "dtype: 'float3' is not allowed"),
    (f"{TRANSLATE} x --bem 3", b"", "No such option: --bem.*See clearhead translate --help$"),
    ("tokenizer train --kid x", b"", "No such option: --kid.*See clearhead tokenizer train --help$"),
    ("trnslate x", b"", "Did you mean 'translate'? See clearhead --help$"),
    (f"{TRANSLATE} x --beam 0", b"", "--beam.*greater than or equal to 1"),
    (f"{TRANSLATE} x --beam 60", b"", "beam: 60 is more than the vocabulary size 28"),
    (f"{TRANSLATE} x --n-best 5", b"", "--n-best: 5 is more than --beam 4"),
    (TRANSLATE, b"a man\n\0\1\2\3\n", "standard input, line 2: contains a zero byte"),
    (f"{TRANSLATE} {STOP}", b"a man\nca\xe9\n", "standard input, line 2: not valid UTF-8"),
    (
        f"{TRANSLATE} {STOP}",
        b"a man\n\n" + b"a " * 200,
        "standard input, line 3: 201 tokens.*128 positions; shorten it$",
    ),
    ("chat gpt --max-new-tokens 100", b"x" * 50, "system prompt and 100 for the answer are more than"),
]


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[tuple[str, bytes], tuple[int, str, str]]:
    """Exit code, stdout and stderr of each case."""
    outputs = calls([(arguments.split(), stdin) for arguments, stdin, _ in CASES], folder)
    return {case[:2]: output for case, output in zip(CASES, outputs, strict=True)}


@pytest.mark.parametrize(("arguments", "stdin", "message"), CASES)
def test_an_error_is_one_line_after_the_results_of_the_lines_before_it(
    results: Any, arguments: str, stdin: bytes, message: str
) -> None:
    code, output, errors = results[arguments, stdin]
    line = re.match(r"standard input, line (\d+)", message)
    assert (code, output.count("\n")) == (2, int(line[1]) - 1 if line else 0), errors
    assert output.endswith("\n") or not output
    assert errors.count("\n") == 1
    parts = message.removesuffix("$").split(".*")
    pattern = ".*".join(map(re.escape, parts)) + "$" * message.endswith("$")
    assert re.search(pattern, errors), errors


def test_an_error_in_a_subprocess(folder: Path) -> None:
    code, output, errors = clearhead("generate", "nowhere", "x", "--device", "tpu", cwd=folder)
    assert (code, output) == (2, "")
    assert errors == "clearhead: device: 'tpu' is not a device; use auto, cpu, cuda or cuda:0\n"
