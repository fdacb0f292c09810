"""Untrusted files of every format: damaged ones are refused with a clear error, quickly and in little memory.

CLEARHEAD_MUTATIONS=20000 sets the number of damaged files instead of 2,000.
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.formats.binary_reader import open_binary
from clearhead.checkpoint.formats.gguf import read_header
from clearhead.errors import UserError
from tests.checkpoint.formats import test_gguf, test_gguf_architectures, test_llama2c
from tests.checkpoint.formats.peers import saved
from tests.checkpoint.formats.test_packed_int4 import quantize_folder
from tests.checkpoint.formats.test_sentence_transformers import save_sentence_encoder
from tests.checkpoint.small_models import tokenizer
from tests.predict import test_languages

COUNT = int(os.environ.get("CLEARHEAD_MUTATIONS", "2000"))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small undamaged model of every format."""
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def write_models(folder: Path) -> None:
    """Write a small model of every format."""
    for name in ("gpt2", "bert-classes", "llama3.2", "marian", "qwen2-window", "qwen3", "phi3-window",
                 "roberta-classes", "distilbert-tags", "modernbert-lm", "bart", "m2m100"):  # fmt: skip
        saved(name, folder / f"hf-{name}")
    tokens = tokenizer(97 + 200)
    template = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", tokens.id("begin"))])
    tokens.engine.post_processor = template
    tokens.save(folder / "hf-llama3.2")
    save_sentence_encoder(folder / "hf-sentences", {"pooling_mode_mean_tokens": True}, normalized=True)
    saved("llama2", folder / "hf-sharded", max_shard_size="60KB")
    for kind in ("F16", "Q4_0"):
        (folder / f"gguf-{kind}").mkdir()
        test_gguf.write_gguf(test_gguf.peer(), folder / f"gguf-{kind}" / "model.gguf", kind)
    for architecture in ("qwen3", "phi3"):
        (folder / f"gguf-{architecture}").mkdir()
        model = test_gguf_architectures.peer(architecture)
        test_gguf_architectures.write_gguf(model, folder / f"gguf-{architecture}" / "model.gguf", architecture)
    for method in ("gptq", "awq"):
        quantize_folder(folder / f"hf-{method}", saved("llama", folder / f"hf-{method}"), method, 16)
    (folder / "hf-nllb").mkdir()
    test_languages.multilingual(folder / "hf-nllb", "nllb", forced_bos_token_id=5)
    (folder / "llama2c").mkdir()
    test_llama2c.write_llama2c(test_llama2c.peer(True), folder / "llama2c").rename(folder / "llama2c" / "llama2c.bin")
    (folder / "ct2-names").mkdir()
    write_ctranslate2(folder / "ct2-names")


def write_ctranslate2(folder: Path) -> None:
    """Write a translator of one layer in CTranslate2's binary version 2."""
    dim, inner, rng = 16, 24, np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"decoder/projection/weight": (6, dim), "decoder/projection/bias": (6,)}
    for stack in ("encoder", "decoder"):
        shapes |= {f"{stack}/embeddings/weight": (6, dim)}
        parts = {"self_attention": [(3 * dim, dim), (dim, dim)], "ffn": [(inner, dim), (dim, inner)]}
        if stack == "decoder":
            parts["attention"] = [(dim, dim), (2 * dim, dim), (dim, dim)]
        for part, matrices in parts.items():
            for number, shape in enumerate(matrices):
                shapes[f"{stack}/layer_0/{part}/linear_{number}/weight"] = shape
                shapes[f"{stack}/layer_0/{part}/linear_{number}/bias"] = shape[:1]
        for norm in ("layer_norm", *(f"layer_0/{part}/layer_norm" for part in parts)):
            shapes |= {f"{stack}/{norm}/gamma": (dim,), f"{stack}/{norm}/beta": (dim,)}
    data = struct.pack("<I", 2) + length_prefixed("TransformerBase") + struct.pack("<II", 2, len(shapes))
    for name, shape in shapes.items():
        array = rng.standard_normal(shape).astype("<f4")
        data += (
            length_prefixed(name)
            + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, 4, array.size)
            + array.tobytes()
        )
    (folder / "model.bin").write_bytes(data)
    for side in ("source", "target"):
        (folder / f"{side}_vocabulary.txt").write_text("<blank>\n<s>\n</s>\na\nb\n")


def length_prefixed(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def read_damaged(folder: Path, count: int) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.formats.mutate", str(folder), str(count)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_damaged_files_are_refused_or_loaded_quickly_and_in_little_memory(models: Path) -> None:
    results = read_damaged(models, COUNT)
    print(results)
    tally = results["tally"]
    assert isinstance(tally, dict)
    formats = {path.name for path in models.iterdir() if path.name != "damaged"}
    assert {name.partition(" ")[0] for name in tally} == formats
    assert {name.partition(" ")[2] for name in tally} == {"refused", "loaded"}
    assert sum(tally.values()) == COUNT
    assert sum(count for name, count in tally.items() if name.endswith("refused")) > COUNT // 2
    assert results["slowest"] < 2
    assert results["memory"] < 500_000_000


def test_undamaged_files_of_every_format_are_loaded(models: Path) -> None:
    for path in sorted(models.iterdir()):
        if path.name == "damaged":
            continue
        source = next(iter([*path.glob("*.gguf"), *path.glob("llama2c.bin")]), path)
        assert read_foreign(source).weights


def test_huge_lengths_are_refused_before_memory_is_allocated(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "gguf-F16", tmp_path / "gguf")
    path = tmp_path / "gguf" / "model.gguf"
    data = path.read_bytes()
    read_foreign(path)  # imports libraries
    for position, value in ((8, 1 << 36), (16, 1 << 36), (24, 1 << 36)):  # tensors, settings, the first key's length
        path.write_bytes(data[:position] + struct.pack("<Q", value) + data[position + 8 :])
        tracemalloc.start()
        with pytest.raises(UserError, match="damaged, or not a file of this format"):
            read_foreign(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("shape", [(0, 256), (256, 0)])
def test_an_empty_tensor_is_refused(kind: str, shape: tuple[int, int], models: Path, tmp_path: Path) -> None:
    data = (models / f"gguf-{kind}" / "model.gguf").read_bytes()
    name = b"blk.0.attn_q.weight" + struct.pack("<I", 2)
    before = name + struct.pack("<QQ", 256, 256)
    assert data.count(before) == 1
    (tmp_path / "model.gguf").write_bytes(data.replace(before, name + struct.pack("<QQ", *shape)))
    with pytest.raises(UserError, match=r"attn_q.weight of shape .* is empty"):
        read_foreign(tmp_path / "model.gguf")


@pytest.mark.parametrize("shape", [(0, (1 << 32) - 1, (1 << 32) - 1), (0,), (2,)])
def test_a_variable_that_is_empty_or_does_not_match_its_shape_is_refused(
    shape: tuple[int, ...], models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "ct2-names", tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "model.bin").read_bytes()
    name = length_prefixed("decoder/projection/bias")
    before = name + struct.pack("<BIBI", 1, 6, 4, 6)
    assert data.count(before) == 1
    after = name + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, 4, 0)
    (tmp_path / "model.bin").write_bytes(data.replace(before, after))
    with pytest.raises(UserError, match=r"projection/bias is duplicated, empty, or does not match its shape"):
        read_foreign(tmp_path)


def test_a_pipe_in_place_of_any_file_never_hangs(models: Path, tmp_path: Path) -> None:
    """It is refused at once, or as if the file were missing."""

    def hang(*_: object) -> None:
        raise TimeoutError("a reader waits for the pipe")

    refused = set()
    signal.signal(signal.SIGALRM, hang)
    for model in sorted(path for path in models.iterdir() if path.name != "damaged"):
        for file in sorted(path.relative_to(model) for path in model.rglob("*") if path.is_file()):
            folder = tmp_path / "copy"
            shutil.copytree(model, folder)
            (folder / file).unlink()
            os.mkfifo(folder / file)
            source = next(iter([*folder.glob("*.gguf"), *folder.glob("llama2c.bin")]), folder)
            signal.alarm(10)
            try:
                read_foreign(source)
            except UserError:
                refused.add(file.name)
            finally:
                signal.alarm(0)
            shutil.rmtree(folder)
    assert {"config.json", "model.safetensors", "model.bin", "model.gguf", "source_vocabulary.txt"} <= refused


def test_an_unpaired_surrogate_is_refused(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "hf-llama3.2", tmp_path, dirs_exist_ok=True)
    for template, fits in (("\\ud83d\\ude42", True), ("\\ud83d", False)):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": "{template}"}}')
        if fits:
            assert read_foreign(tmp_path).extra["chat_template"] == "🙂"
            continue
        with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged"):
            read_foreign(tmp_path)


def test_overlapping_tensors_are_refused(models: Path, tmp_path: Path) -> None:
    data = (models / "gguf-F16" / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with open_binary(path) as reader:
        tensors = read_header(reader)[1]
    start = min(tensor.offset for tensor in tensors.values())
    name, tensor = max(tensors.items(), key=lambda each: each[1].offset)
    info = name.encode() + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
    info += struct.pack("<I", tensor.kind)
    before = info + struct.pack("<Q", tensor.offset - start)
    assert data.count(before) == 1
    for offset in (0, 32, tensor.offset - start + 32, 1 << 62, (1 << 64) - 32, 7):
        path.write_bytes(
            data.replace(info + struct.pack("<Q", tensor.offset - start), info + struct.pack("<Q", offset))
        )
        with pytest.raises(UserError, match="is outside the file, or overlaps another tensor"):
            read_foreign(path)
