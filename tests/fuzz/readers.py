"""Coverage-guided fuzzing of the readers of our own and of foreign files with atheris (`make fuzz`).

    python -m tests.fuzz.readers CORPUS [libFuzzer's options]      python -m tests.fuzz.readers --seeds CORPUS

The first byte of an input chooses the reader, the rest is the file; the other files of a folder are valid. A reader
returns or raises UserError: anything else is a finding. The inputs that cover new code are kept in CORPUS.
"""
# ruff: noqa: E501

import contextlib
import logging
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_BYTES = 20_000
KEPT = Path(__file__).with_name("readers.zip")


def prepare_targets(folder: Path) -> list[tuple[Path, Callable[[], object]]]:
    """Write small valid models and texts; return the files to replace, each with the call that reads it."""
    import torch

    from clearhead.checkpoint import load_model, model_folder_info, read_card, save_model
    from clearhead.checkpoint.formats import export_model, read_foreign
    from clearhead.config import ModelConfig
    from clearhead.config.data import Corpus
    from clearhead.config.load import preset
    from clearhead.config.recipe import load_recipe, recipe_text
    from clearhead.data.formats import read_corpus
    from clearhead.model import build
    from clearhead.text import load_folder, train
    from clearhead.text.word_vectors import WordVectors

    torch.set_num_threads(1)
    tokens = train(["ab a b"], "char", 8)
    common = {"dim": 8, "heads": 2, "ff_dim": 8, "vocab_size": 8, "max_positions": 16}
    llama = {"family": "decoder", "decoder_layers": 1, "position": "rotary", "activation": "swiglu", "norm": "rms"}
    marian = {"family": "encoder-decoder", "encoder_layers": 1, "decoder_layers": 1, "norm_position": "post"}
    marian |= {"tie": "all", "scale_embedding": True, "sinusoid": "halves", "output_bias": True}
    for name, settings in (("llama", llama | {"bias": False}), ("marian", marian)):
        config = ModelConfig.build(common | settings)
        for suffix, dtype in (("", None), ("-int8", torch.int8)):
            save_model(folder / f"{name}{suffix}", build(config), tokens, {"task": "x"}, "# x\n\n## Data\n- y\n", dtype)
        with contextlib.suppress(ValueError):
            export_model(load_model(folder / name), folder / f"hf-{name}", "hf")
    byte_level = folder / "byte-level"
    save_model(
        byte_level,
        build(ModelConfig.build(common | llama | {"bias": False, "vocab_size": 300})),
        train(["ab"], "byte-bpe", 262),
    )
    export_model(load_model(byte_level), folder / "gguf", "gguf")
    [gguf] = (folder / "gguf").glob("*.gguf")

    def own(name: str) -> Callable[[], object]:
        return lambda: (model_folder_info(folder / name), load_model(folder / name, verify=False))

    def corpus(format: str, columns: tuple[str, ...], **settings: Any) -> tuple[Path, Callable[[], object]]:
        path = folder / f"text.{format}"
        path.write_text(
            {
                "csv": 'text,label\na,"b"\n',
                "jsonl": '{"text": "a", "label": "b"}\n',
                "conll": "a B-X\n\nb O\n",
                "trec": "A:b c\n",
                "squad": '{"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [{"id": "1", "question": "q", "answers": [{"text": "c", "answer_start": 0}]}]}]}]}',
            }.get(format, "a\tb\n")
        )
        chosen = Corpus.build({"format": format, "files": [str(path)]} | settings)
        return path, lambda: list(read_corpus(chosen, columns))

    targets = [
        (folder / name / file, own(name))
        for name in ("llama", "llama-int8", "marian")
        for file in ("config.json", "model.safetensors")
    ]
    for name in ("hf-llama", "hf-marian"):
        for path in sorted((folder / name).glob("*")) if (folder / name).is_dir() else []:
            if path.name != "tokenizer.json":
                targets.append((path, lambda name=name: read_foreign(folder / name)))  # type: ignore[misc]
    index = folder / "llama-sharded" / "model.safetensors.index.json"
    shutil.copytree(folder / "llama", index.parent)
    (index.parent / "model.safetensors").rename(index.parent / "a.safetensors")
    index.write_text('{"weight_map": {"x": "a.safetensors"}}')
    targets += [
        (index, own("llama-sharded")),
        (folder / "llama" / "manifest.json", lambda: load_model(folder / "llama")),
    ]
    targets += [(gguf, lambda: read_foreign(gguf)), *binary_targets(folder, read_foreign)]
    card = folder / "llama" / "README.md"
    targets += [(card, lambda: (read_card(card.read_text(errors="replace")), model_folder_info(card.parent)))]
    for name, read in (("recipe.yaml", load_recipe), ("model.yaml", preset)):
        (folder / name).write_text(
            recipe_text("mini-en-de") if name == "recipe.yaml" else "preset: tiny-gpt\ndim: 64\n"
        )
        targets.append((folder / name, lambda read=read, name=name: read(str(folder / name))))  # type: ignore[misc]
    targets += [corpus("tsv", ("source", "target")), corpus("csv", ("text", "label"), header=True)]
    targets += [corpus("jsonl", ("text", "label")), corpus("conll", ("tokens", "tags")), corpus("text", ("text",))]
    targets += [corpus("squad", ("context", "question", "answer", "start")), corpus("trec", ("text", "label"))]
    vectors, vocabulary = folder / "vectors.txt", folder / "bert" / "vocab.txt"
    vectors.write_text("2 2\na 1 2\nb 3 4\n")
    vocabulary.parent.mkdir()
    vocabulary.write_text("[UNK]\na\n")
    return [
        *targets,
        (vectors, lambda: WordVectors.load(vectors)),
        (vocabulary, lambda: load_folder(vocabulary.parent)),
    ]


def binary_targets(folder: Path, read_foreign: Callable[[Path], object]) -> list[tuple[Path, Callable[[], object]]]:
    """A llama2.c model with its tokenizer, and a CTranslate2 model."""
    import struct

    from tests.checkpoint.formats.test_damaged_files import write_ctranslate2

    dim, ff_dim, layers, heads, vocab, positions = 4, 4, 1, 1, 6, 4
    floats = (
        vocab * dim + layers * (2 * dim + 4 * dim * dim + 3 * dim * ff_dim) + dim + 2 * positions * (dim // heads // 2)
    )
    model = folder / "llama2c" / "model.bin.bin"
    model.parent.mkdir()
    model.write_bytes(struct.pack("<7i", dim, ff_dim, layers, heads, heads, vocab, positions) + bytes(4 * floats))
    tokenizer = model.with_name("tokenizer.bin")
    texts = [b"<unk>", b"<s>", b"</s>", b"a", b"b", b"ab"]
    tokenizer.write_bytes(struct.pack("<i", 5) + b"".join(struct.pack("<fi", 0.0, len(each)) + each for each in texts))
    translator = folder / "ct2"
    translator.mkdir()
    write_ctranslate2(translator)
    return [
        (model, lambda: read_foreign(model)),
        (tokenizer, lambda: read_foreign(model)),
        (translator / "model.bin", lambda: read_foreign(translator)),
        (translator / "source_vocabulary.txt", lambda: read_foreign(translator)),
    ]


class Readers:
    """Reads inputs in a temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="clearhead-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        )
        self.targets = prepare_targets(self.folder)
        self.valid = [path.read_bytes() for path, _ in self.targets]

    def read(self, data: bytes) -> bool:
        """Read an input; return whether it is valid."""
        from clearhead.errors import UserError

        if not data:
            return False
        number = data[0] % len(self.targets)
        path, read = self.targets[number]
        path.write_bytes(data[1:])
        try:
            read()
        except UserError as error:
            if not str(error).strip():
                raise AssertionError("an error without a message") from error
            return False
        finally:
            path.write_bytes(self.valid[number])
        return True

    def seeds(self) -> list[bytes]:
        """The valid files, and the inputs that are kept in the repository."""
        files = [bytes([number]) + data for number, data in enumerate(self.valid) if len(data) < MAX_BYTES]
        if KEPT.exists():
            with zipfile.ZipFile(KEPT) as kept:
                files += [kept.read(name) for name in sorted(kept.namelist())]
        return files


def main() -> None:
    """Write the seeds, or fuzz."""
    logging.disable()
    if sys.argv[1] == "--seeds":
        for number, data in enumerate(Readers().seeds()):
            (Path(sys.argv[2]) / f"seed-{number:04}").write_bytes(data)
        return
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["clearhead"]):
        readers = Readers()

    def run(data: bytes) -> None:
        readers.read(data)

    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
