"""llama2.c files: the published model generates its story, and random Llamas give the logits of transformers."""

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from clearhead.checkpoint.formats import import_model, read_foreign
from clearhead.checkpoint.formats.bpe import sentencepiece_bpe
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.errors import UserError
from clearhead.predict import load
from tests.checkpoint.formats.test_gguf import interleave
from tests.corpora import corpus
from tests.model.peers import disturb

STORY = (  # output of llama2.c with temperature 0, as in its own tests
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a "
    "big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, let's go to the park.\" "
    "Lily was sad and didn't know what to do. She said, \"I want to play with your ball, but I can't find it.\"\n"
    "Lily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know what to do.\"\n"
    "Lily didn't want to help her mom, so she"
)
LAYERS = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS += ["post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj"]
TOKENS = ["<unk>", "\n<s>\n", "\n</s>\n", *(f"<0x{n:02X}>" for n in range(256)), " ", *"abc", " a", "ab"]


def peer(tied: bool) -> Any:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=len(TOKENS),
            max_position_embeddings=40,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    )
    disturb(model, 0.1)
    return model.eval()


def write_llama2c(model: Any, folder: Path) -> Path:
    """Write the format of llama2.c's first exporter."""
    theirs, vocab_size = model.config, len(TOKENS)
    sign = 1 if theirs.tie_word_embeddings else -1
    header = struct.pack("<7i", 32, 48, 2, 4, 2, sign * vocab_size, 40)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    arrays = [state["model.embed_tokens.weight"]]
    for name in LAYERS:
        for number in range(2):
            array = state[f"model.layers.{number}.{name}.weight"]
            if name.endswith(("q_proj", "k_proj")):
                array = interleave(array, 4 if name.endswith("q_proj") else 2)
            arrays.append(array)
    arrays += [state["model.norm.weight"], np.zeros((2, 40, 4), np.float32)]
    if not theirs.tie_word_embeddings:
        arrays.append(state["lm_head.weight"])
    (folder / "model.bin").write_bytes(header + b"".join(part.astype("<f4").tobytes() for part in arrays))
    tokens = struct.pack("<i", 7)
    for number, piece in enumerate(TOKENS):
        tokens += struct.pack("<fi", -float(number), len(piece.encode())) + piece.encode()
    (folder / f"tok{vocab_size}.bin").write_bytes(tokens)
    return folder / "model.bin"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_equal_those_of_transformers(tied: bool, tmp_path: Path) -> None:
    model = peer(tied)
    imported = read_foreign(write_llama2c(model, tmp_path))
    ids = torch.randint(len(TOKENS), (2, 33))
    with torch.no_grad():
        expected = model(ids).logits
        assert expected.std() > 0.1
        torch.testing.assert_close(
            build_with_weights(imported.config, imported.weights)(ids), expected, atol=1e-5, rtol=0
        )


def test_merges_follow_scores_and_unknown_characters_become_bytes(tmp_path: Path) -> None:
    tokenizer = read_foreign(write_llama2c(peer(True), tmp_path)).tokenizers[0]
    pieces = [tokenizer.id_to_token(number) for number in tokenizer.encode("ab cabé")]
    assert pieces == ["▁a", "b", "▁", "c", "ab", "<0xC3>", "<0xA9>"]  # " a" has a higher score than "ab"
    assert tokenizer.decode(tokenizer.encode("ab cabé")) == "ab cabé"


def test_stories260k_generates_its_story(tmp_path: Path) -> None:
    import_model(corpus("weights/stories260K/stories260K.bin"), tmp_path / "ours")
    model = load(tmp_path / "ours", device="cpu")
    assert model.generate("", max_new_tokens=200, temperature=0.0).text == STORY


def test_damaged_and_other_files_are_refused(tmp_path: Path) -> None:
    path = write_llama2c(peer(True), tmp_path)
    data = path.read_bytes()
    for changed, message in (
        (data[:-4], "bytes expected"),
        (data + b"1234", "4 unexpected bytes at the end"),
        (struct.pack("<Ii", 0x616B3432, 2) + data[8:], "version 2 is not supported"),
        (struct.pack("<i", -32) + data[4:], "dim: -32 is too small"),
        (data[:8] + struct.pack("<i", 1000) + data[12:], "bytes expected"),
    ):
        path.write_bytes(changed)
        with pytest.raises(UserError, match=message):
            read_foreign(path)
    path.write_bytes(data)
    (tmp_path / f"tok{len(TOKENS)}.bin").unlink()
    with pytest.raises(UserError, match=r"tok265\.bin is missing, and so is tokenizer\.bin"):
        read_foreign(path)


def test_a_vocabulary_of_which_every_split_is_a_merge_is_refused() -> None:
    tokens = ["<unk>", *(letter * length for letter in "abcdef" for length in range(1, 512))]
    start = time.process_time()
    with pytest.raises(UserError, match=r"tok: over 1,048,576 merges, or 33,554,432 characters in them; use a"):
        sentencepiece_bpe(tokens, [0.0] * len(tokens), 0, [0], [], True, "tok")
    assert time.process_time() - start < 2
