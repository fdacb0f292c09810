"""Files that nobody vouches for: damaged in any way, they are refused with a clear error, quickly and in little memory.

CLEARHEAD_MUTATIONS=20000 reads so many instead of 2,000.
"""

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.formats.binary import opened
from clearhead.checkpoint.formats.gguf import header
from clearhead.errors import UserError
from tests.checkpoint.formats import test_gguf, test_llama2c
from tests.checkpoint.formats.peers import saved
from tests.checkpoint.formats.test_sentences import sentences
from tests.checkpoint.small import tokenizer

COUNT = int(os.environ.get("CLEARHEAD_MUTATIONS", "2000"))
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small whole model of every format."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("gpt2", "bert-classes", "llama3.2", "marian"):
        saved(name, folder / f"hf-{name}")
    tokens = tokenizer(97 + 200)
    frame = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", tokens.id("begin"))])
    tokens.engine.post_processor = frame
    tokens.save(folder / "hf-llama3.2")
    sentences(folder / "hf-sentences", {"pooling_mode_mean_tokens": True}, normalized=True)
    saved("llama2", folder / "hf-sharded", max_shard_size="60KB")
    for kind in ("F16", "Q4_0"):
        (folder / f"gguf-{kind}").mkdir()
        test_gguf.written(test_gguf.peer(), folder / f"gguf-{kind}" / "model.gguf", kind)
    (folder / "llama2c").mkdir()
    test_llama2c.written(test_llama2c.peer(True), folder / "llama2c").rename(folder / "llama2c" / "llama2c.bin")
    (folder / "ct2-names").mkdir()
    written_ctranslate2(folder / "ct2-names")
    return folder


def written_ctranslate2(folder: Path) -> None:
    """A translator of one layer in CTranslate2's second layout."""
    dim, inner, chance = 16, 24, np.random.default_rng(0)
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
    data = struct.pack("<I", 2) + text("TransformerBase") + struct.pack("<II", 2, len(shapes))
    for name, shape in shapes.items():
        array = chance.standard_normal(shape).astype("<f4")
        data += text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, 4, array.size) + array.tobytes()
    (folder / "model.bin").write_bytes(data)
    for side in ("source", "target"):
        (folder / f"{side}_vocabulary.txt").write_text("<blank>\n<s>\n</s>\na\nb\n")


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def run(folder: Path, count: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.formats.mutate", str(folder), str(count)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_damaged_files_are_refused_or_loaded_whole_quickly_and_in_little_memory(whole: Path) -> None:
    found = run(whole, COUNT)
    print(found)
    tally = found["tally"]
    assert isinstance(tally, dict)
    formats = {path.name for path in whole.iterdir() if path.name != "damaged"}
    assert {name.partition(" ")[0] for name in tally} == formats
    assert {name.partition(" ")[2] for name in tally} == {"refused", "loaded"}
    assert sum(tally.values()) == COUNT
    assert sum(count for name, count in tally.items() if name.endswith("refused")) > COUNT // 2
    assert found["slowest"] < 2
    assert found["memory"] < 500_000_000


def test_whole_files_of_every_format_load(whole: Path) -> None:
    for path in sorted(whole.iterdir()):
        if path.name == "damaged":
            continue
        source = next(iter([*path.glob("*.gguf"), *path.glob("llama2c.bin")]), path)
        assert read_foreign(source).weights


def test_a_header_of_a_hundred_gigabytes_costs_nothing(whole: Path, tmp_path: Path) -> None:
    """Every length is compared with the file before anything is made."""
    shutil.copytree(whole / "gguf-F16", tmp_path / "gguf")
    path = tmp_path / "gguf" / "model.gguf"
    data = path.read_bytes()
    read_foreign(path)  # what is loaded once only
    for at, value in ((8, 1 << 36), (16, 1 << 36), (24, 1 << 36)):  # tensors, settings, the first key's length
        path.write_bytes(data[:at] + struct.pack("<Q", value) + data[at + 8 :])
        tracemalloc.start()
        with pytest.raises(UserError, match="damaged, or no file of this kind"):
            read_foreign(path)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["F16", "Q4_0"])
@pytest.mark.parametrize("shape", [(0, 256), (256, 0)])
def test_an_empty_tensor_is_refused(kind: str, shape: tuple[int, int], whole: Path, tmp_path: Path) -> None:
    data = (whole / f"gguf-{kind}" / "model.gguf").read_bytes()
    name = b"blk.0.attn_q.weight" + struct.pack("<I", 2)
    before = name + struct.pack("<QQ", 256, 256)
    assert data.count(before) == 1
    (tmp_path / "model.gguf").write_bytes(data.replace(before, name + struct.pack("<QQ", *shape)))
    with pytest.raises(UserError, match=r"attn_q.weight of shape .* is empty"):
        read_foreign(tmp_path / "model.gguf")


@pytest.mark.parametrize("shape", [(0, (1 << 32) - 1, (1 << 32) - 1), (0,), (2,)])
def test_a_variable_of_no_size_or_another_than_it_says_is_refused(
    shape: tuple[int, ...], whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "ct2-names", tmp_path, dirs_exist_ok=True)
    data = (tmp_path / "model.bin").read_bytes()
    name = text("decoder/projection/bias")
    before = name + struct.pack("<BIBI", 1, 6, 4, 6)
    assert data.count(before) == 1
    after = name + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, 4, 0)
    (tmp_path / "model.bin").write_bytes(data.replace(before, after))
    with pytest.raises(UserError, match=r"projection/bias stands twice, is empty, or is not of its own shape"):
        read_foreign(tmp_path)


def test_half_a_character_is_refused(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "hf-llama3.2", tmp_path, dirs_exist_ok=True)
    for template, fits in (("\\ud83d\\ude42", True), ("\\ud83d", False)):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": "{template}"}}')
        if fits:
            assert read_foreign(tmp_path).extra["chat_template"] == "🙂"
            continue
        with pytest.raises(UserError, match=r"tokenizer_config\.json is damaged"):
            read_foreign(tmp_path)


def test_tensors_that_share_bytes_are_refused(whole: Path, tmp_path: Path) -> None:
    data = (whole / "gguf-F16" / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with opened(path) as reader:
        tensors = header(reader)[1]
    start = min(stored.offset for stored in tensors.values())
    name, stored = max(tensors.items(), key=lambda each: each[1].offset)
    info = name.encode() + struct.pack(f"<I{len(stored.shape)}Q", len(stored.shape), *reversed(stored.shape))
    info += struct.pack("<I", stored.kind)
    before = info + struct.pack("<Q", stored.offset - start)
    assert data.count(before) == 1
    for offset in (0, 32, stored.offset - start + 32, 1 << 62, (1 << 64) - 32, 7):
        path.write_bytes(
            data.replace(info + struct.pack("<Q", stored.offset - start), info + struct.pack("<Q", offset))
        )
        with pytest.raises(UserError, match="lies outside the file, or where another tensor is"):
            read_foreign(path)
