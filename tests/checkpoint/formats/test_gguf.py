"""GGUF import: files of the gguf library give the logits of transformers for every quantization."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import import_model, read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.errors import UserError
from tests.checkpoint.small_models import tokenizer
from tests.model.peers import disturb

gguf = pytest.importorskip("gguf", reason="gguf is not installed")
from gguf.quants import quantize  # noqa: E402 (after the skip)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: E402

DIM, HEADS, KV_HEADS = 256, 4, 2  # K-quants have blocks of 256
SAMPLES = ["The cat sat on the mat.", "die Katze saß — 猫坐在垫子上!", "a  b\n\tc 1234 don't", "", " x", "🙂"]
QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TOKENS = tokenizer()
VOCABULARY = 288


def peer(**settings: Any) -> Any:
    """Return a tiny Llama of transformers."""
    config = transformers.LlamaConfig(
        hidden_size=DIM,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        attn_implementation="eager",
        **settings,
    )
    model = transformers.LlamaForCausalLM(config)
    disturb(model, 0.05)
    return model.eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Put rotary pairs next to each other, as llama.cpp's converter does."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model: Any, path: Path, kind: str, **extra: Any) -> Path:
    """Write a GGUF file with the gguf library, in the names and layouts of llama.cpp."""
    types, theirs = gguf.GGMLQuantizationType, model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(theirs.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(512)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(DIM // HEADS)
    writer.add_rope_freq_base(theirs.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(theirs.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    for key, value in extra.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key.replace("__", "."), value)
    tokens = [TOKENS.id_to_token(n) for n in range(len(TOKENS))] + [f"[{n}]" for n in range(len(TOKENS), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if n in TOKENS.roles.values() else 1 for n in range(VOCABULARY)])

    writer.add_token_merges([" ".join(pair) for pair in json.loads(TOKENS.engine.to_str())["model"]["merges"]])
    writer.add_bos_token_id(TOKENS.id("begin"))
    writer.add_eos_token_id(TOKENS.id("end"))
    writer.add_add_bos_token(True)
    writer.add_chat_template("{{ messages }}")
    parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    parts |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    parts |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and theirs.tie_word_embeddings:
            continue
        array = tensor.numpy()
        name = name.removeprefix("model.").replace("embed_tokens", "token_embd").replace("layers.", "blk.")
        name = "output_norm.weight" if name == "norm.weight" else name.replace("lm_head", "output")
        for old, new in parts.items():
            name = name.replace(old, new)
        if "attn_q" in name or "attn_k" in name:
            array = interleave(array, HEADS if "attn_q" in name else KV_HEADS)
        if array.ndim == 1 or kind == "F32":
            writer.add_tensor(name, array)
        elif kind == "F16":
            writer.add_tensor(name, array.astype(np.float16))
        else:
            writer.add_tensor(name, quantized_blocks(array, types[kind]), raw_dtype=types[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantized_blocks(array: np.ndarray, kind: Any) -> np.ndarray:
    """Quantize or, for types that the library only dequantizes, return random blocks with small scales."""
    if kind.name not in K_QUANTS:
        return quantize(array, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (array.shape[0], array.shape[1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.array([0.002, 0.001], np.float16).tobytes(), np.uint8)
    offset = {"Q2_K": 80, "Q3_K": 108, "Q4_K": 0, "Q5_K": 0, "Q6_K": 208}[kind.name]
    count = 4 if kind.name in ("Q2_K", "Q4_K", "Q5_K") else 2
    blocks[..., offset : offset + count] = scale[:count]
    return blocks.reshape(array.shape[0], -1)


def read_with_transformers(path: Path, model: Any) -> Any:
    """Load a GGUF file with transformers' own reader."""
    loaded = transformers.LlamaForCausalLM(model.config).eval()
    imported = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=loaded)["tensors"]
    missing, unexpected = loaded.load_state_dict(imported, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    return loaded


@torch.no_grad()
def assert_same_logits(network: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    ids = torch.randint(VOCABULARY, (2, 19))
    expected = theirs(ids).logits
    assert expected.std() > 0.05
    torch.testing.assert_close(network(ids), expected, atol=tolerance * max(1.0, expected.abs().max().item()), rtol=0)


@pytest.mark.parametrize("kind", [*QUANTIZABLE, *K_QUANTS])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_quantization_gives_the_logits_of_transformers(kind: str, tied: bool, tmp_path: Path) -> None:
    model = peer(tie_word_embeddings=tied)
    imported = read_foreign(write_gguf(model, tmp_path / "model.gguf", kind))
    network = build_with_weights(imported.config, imported.weights)
    assert_same_logits(network, read_with_transformers(tmp_path / "model.gguf", model))
    if kind == "F32":
        assert_same_logits(network, model)


def test_q4_0_and_q8_0_by_hand(tmp_path: Path) -> None:
    """Blocks of 32 numbers with a scale: 8 bits each, or 4 bits with the first 16 in the low half of each byte."""
    model = peer()
    scale = np.array([0.5], np.float16).tobytes()
    q8 = np.frombuffer(scale + np.arange(-16, 16, dtype=np.int8).tobytes(), np.uint8)
    q4 = np.frombuffer(scale + bytes(low | (15 - low) << 4 for low in range(16)), np.uint8)
    for kind, raw, expected in (
        ("Q8_0", q8, np.arange(-16, 16) * 0.5),
        ("Q4_0", q4, np.concatenate([np.arange(16), np.arange(15, -1, -1)]) * 0.5 - 4),
    ):
        path = write_gguf(model, tmp_path / f"{kind}.gguf", kind)
        data = path.read_bytes()
        stored = quantize(model.model.layers[0].mlp.down_proj.weight.detach().numpy(), gguf.GGMLQuantizationType[kind])
        assert data.count(stored[0].tobytes()) == 1
        path.write_bytes(data.replace(stored[0, : len(raw)].tobytes(), raw.tobytes()))
        row = read_foreign(path).weights["decoder.layers.0.feed_forward.down.weight"][0, :32]
        np.testing.assert_array_equal(row.numpy(), expected.astype(np.float32))


def test_reading_needs_no_optional_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(peer(), tmp_path / "model.gguf", "Q4_1")
    for name in ("gguf", "gguf.quants", "transformers", "sentencepiece"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    assert read_foreign(path).weights


def test_a_type_of_weights_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = write_gguf(peer(), tmp_path / "model.gguf", "Q8_0")
    data = path.read_bytes()
    name = b"blk.0.ffn_down.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # after the number of dimensions and the shape
    assert data[kind : kind + 4] == struct.pack("<I", 8)
    path.write_bytes(data[:kind] + struct.pack("<I", 20) + data[kind + 4 :])
    with pytest.raises(UserError, match=r"blk\.0\.ffn_down\.weight: weights of type 20 are not supported; use"):
        read_foreign(path)


def test_tokenizer_chat_template_and_special_tokens_are_imported(tmp_path: Path) -> None:
    path = write_gguf(peer(), tmp_path / "model.gguf", "F16")
    import_model(path, tmp_path / "ours")
    loaded = load_model(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in SAMPLES:
        assert loaded.tokenizers[0].encode(text) == TOKENS.encode(text) == theirs(text).input_ids
        assert loaded.tokenizers[0].decode(TOKENS.encode(text)) == text
    assert loaded.extra["begin"] == [TOKENS.id("begin")]
    assert loaded.extra["eos_ids"] == [TOKENS.id("end")]
    assert loaded.extra["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"llama__rope__scaling__factor": 2.0}, "this type of rotary scaling"),
        ({"llama__rope__scale_linear": 4.0}, "this type of rotary scaling"),
        ({"llama__attention__causal": False}, "non-causal attention"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "this type of rotary scaling"),
        ({"llama__logit_scale": 2.0}, "logit_scale: 2.0: no support for this scale or limit"),
        ({"llama__vocab_size": 100}, "288 × 256, but 100 × 256"),
        ({"llama__rope__dimension_count": 32}, "a partial rotary embedding"),
    ],
)
def test_unsupported_features_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = peer()
    path = tmp_path / "model.gguf"
    if "llama__rope__dimension_count" in change:
        data = write_gguf(model, path, "F16").read_bytes()
        key = b"llama.rope.dimension_count" + (4).to_bytes(4, "little")
        path.write_bytes(data.replace(key + (64).to_bytes(4, "little"), key + (32).to_bytes(4, "little")))
    else:
        write_gguf(model, path, "F16", **change)
    with pytest.raises(UserError, match=message):
        read_foreign(path)


def test_unknown_settings_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_foreign(write_gguf(peer(), tmp_path / "model.gguf", "F16", llama__flux=7))
    assert "llama.flux: unknown settings" in caplog.text


def test_other_architectures_and_tokenizers_are_refused(tmp_path: Path) -> None:
    path = write_gguf(peer(), tmp_path / "model.gguf", "F16")
    data = path.read_bytes()
    for old, new, message in (
        (b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama", b"qwens", "general.architecture: 'qwens'"),
        (b"ggml.pre\x08\0\0\0\x05\0\0\0\0\0\0\0gpt-2", b"gpt-x", "tokenizer.ggml.pre: 'gpt-x'"),
        (b"ggml.model\x08\0\0\0\x04\0\0\0\0\0\0\0gpt2", b"rwkv", "tokenizer.ggml.model: 'rwkv'"),
    ):
        assert data.count(old) == 1
        path.write_bytes(data.replace(old, old[: -len(new)] + new))
        with pytest.raises(UserError, match=message):
            read_foreign(path)
