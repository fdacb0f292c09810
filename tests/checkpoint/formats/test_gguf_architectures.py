"""GGUF files of Qwen2, Qwen3 and Phi-3 give the logits of transformers, and tokenizers the ids of llama.cpp."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, import_model, read_foreign
from clearhead.checkpoint.formats.gguf import read_tokenizer
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.errors import UserError
from tests.checkpoint.small_models import tokenizer
from tests.model.peers import disturb

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

TOKENS, WORDS = tokenizer(), 288
SETTINGS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SETTINGS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": WORDS}
SETTINGS |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 24}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}),
}
PARTS = {  # names of transformers to llama.cpp's, as its converter has them
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(model: Any, path: Path, architecture: str, **extra: float) -> None:
    """Write a file with the gguf library; these architectures keep the rotary layout."""
    theirs = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(theirs.num_hidden_layers)
    writer.add_context_length(theirs.max_position_embeddings)
    writer.add_embedding_length(theirs.hidden_size)
    writer.add_feed_forward_length(theirs.intermediate_size)
    writer.add_head_count(theirs.num_attention_heads)
    writer.add_head_count_kv(theirs.num_key_value_heads)
    if architecture == "qwen3":
        writer.add_key_length(theirs.head_dim)
        writer.add_value_length(theirs.head_dim)
    if architecture == "phi3":
        writer.add_sliding_window(theirs.sliding_window)
    writer.add_rope_freq_base(theirs.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(theirs.rms_norm_eps)
    for key, value in extra.items():
        writer.add_float32(f"{architecture}.{key.replace('__', '.')}", value)
    vocabulary = [TOKENS.id_to_token(number) for number in range(len(TOKENS))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary + [f"[{number}]" for number in range(len(TOKENS), WORDS)])
    writer.add_token_types([3 if n in TOKENS.roles.values() else 1 for n in range(WORDS)])
    writer.add_token_merges([])
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and theirs.tie_word_embeddings:
            continue
        for old, new in PARTS.items():
            name = name.replace(f"{old}.", f"{new}.")
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def peer(architecture: str) -> Any:
    name, settings = MODELS[architecture]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SETTINGS | settings, attn_implementation="eager"))
    disturb(model, 0.12)
    return model.eval()


@pytest.mark.parametrize("architecture", MODELS)
@torch.no_grad()
def test_a_file_gives_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    theirs = peer(architecture)
    write_gguf(theirs, tmp_path / "model.gguf", architecture)
    imported = read_foreign(tmp_path / "model.gguf")
    network = build_with_weights(imported.config, imported.weights).eval()
    ids = torch.randint(2, WORDS, (2, 21))
    torch.testing.assert_close(network(ids), theirs(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_an_export_is_read_back(architecture: str, tmp_path: Path) -> None:
    write_gguf(peer(architecture), tmp_path / "model.gguf", architecture)
    import_model(tmp_path / "model.gguf", tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    export_model(loaded, tmp_path / "out", "gguf")
    again = read_foreign(tmp_path / "out" / "model.gguf")
    assert again.config == loaded.config
    for name, tensor in loaded.network.half().float().state_dict().items():
        if tensor.dim() > 1 and name in again.weights:
            assert again.weights[name].equal(tensor), name
    assert again.tokenizers[0].encode("Don't 1234  hé") == loaded.tokenizers[0].encode("Don't 1234  hé")


def test_other_architectures_and_scalings_are_named(tmp_path: Path) -> None:
    theirs = peer("phi3")
    write_gguf(theirs, tmp_path / "a.gguf", "phi3", rope__scaling__attn_factor=1.19)
    with pytest.raises(
        UserError, match=r"rope\.scaling\.attn_factor: 1\.19: no support for this type of rotary scaling"
    ):
        read_foreign(tmp_path / "a.gguf")
    write_gguf(theirs, tmp_path / "b.gguf", "gemma2")
    with pytest.raises(UserError, match=r"'gemma2' needs soft caps of logits, not supported; supported: llama, qwen2"):
        read_foreign(tmp_path / "b.gguf")


VOCABULARIES = Path(os.environ.get("CLEARHEAD_GGML_VOCABS", "missing"))
SEPARATOR = "\n__ggml_vocab_test__\n"  # after each text
REQUIRED = ("qwen2", "llama-bpe", "llama-spm", "phi-3", "gpt-2", "bert-bge")


@pytest.mark.skipif(not VOCABULARIES.is_dir(), reason="CLEARHEAD_GGML_VOCABS names no folder of ggml-vocab-*.gguf")
@pytest.mark.parametrize("path", sorted(VOCABULARIES.glob("ggml-vocab-*.gguf.inp")), ids=lambda path: path.stem)
def test_a_vocabulary_gives_the_ids_of_llama_cpp(path: Path) -> None:
    """The files of llama.cpp's models folder: FILE.inp has texts, FILE.out a line of ids for each."""
    file = path.with_suffix("")
    try:
        tokens = read_tokenizer(file)
    except UserError as error:
        if file.stem.removeprefix("ggml-vocab-") in REQUIRED:
            raise
        pytest.skip(str(error))
    texts = path.read_text(encoding="utf-8").split(SEPARATOR)[:-1]
    lines = path.with_suffix(".out").read_text(encoding="utf-8").splitlines()
    assert len(texts) == len(lines) > 5
    for text, line in zip(texts, lines, strict=True):
        assert tokens.encode(text) == [int(number) for number in line.split()], repr(text)
