"""Any configuration of an architecture that we read, drawn at random: transformers' outputs, in and out.

CLEARHEAD_CONFIGS=300 draws so many of each instead of 10.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import export_model, import_model
from tests.checkpoint.formats.peers import WORDS, ours, outputs
from tests.model.peers import disturb

COUNT = int(os.environ.get("CLEARHEAD_CONFIGS", "10"))
EPS = st.sampled_from([1e-12, 1e-6, 1e-5, 1e-3, 1e-2])
INNER, LAYERS, HEADS = st.sampled_from([1, 7, 24, 33]), st.integers(1, 3), st.sampled_from([1, 2, 3, 4])
Made = tuple[str, dict[str, Any]]


@st.composite
def llama(draw: Any) -> Made:
    heads, head_dim = draw(HEADS), draw(st.sampled_from([2, 4, 6, 16]))
    rope = {"rope_type": "default", "rope_theta": draw(st.sampled_from([2.0, 100.0, 1e4, 5e5]))}
    if draw(st.booleans()):
        low = draw(st.sampled_from([0.5, 1.0, 2.0]))
        rope |= {"rope_type": "llama3", "factor": draw(st.sampled_from([1.0, 2.0, 32.0])), "low_freq_factor": low}
        rope |= {"high_freq_factor": low * draw(st.sampled_from([1.5, 4.0]))}
        rope |= {"original_max_position_embeddings": draw(st.sampled_from([4, 20, 64]))}
    found = {"num_attention_heads": heads, "head_dim": head_dim, "rope_parameters": rope, "rms_norm_eps": draw(EPS)}
    found |= {"num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))}
    found |= {"hidden_size": heads * draw(st.sampled_from([head_dim, 5, 12])), "intermediate_size": draw(INNER)}
    found |= {"num_hidden_layers": draw(LAYERS), "tie_word_embeddings": draw(st.booleans())}
    found |= {"max_position_embeddings": draw(st.sampled_from([8, 40])), "bos_token_id": None, "eos_token_id": None}
    if draw(st.booleans()):
        return "MistralForCausalLM", found | {"sliding_window": draw(st.sampled_from([None, 1, 2, 5, 100]))}
    return "LlamaForCausalLM", found


@st.composite
def gpt(draw: Any) -> Made:
    heads = draw(HEADS)
    found = {"n_head": heads, "n_embd": heads * draw(st.sampled_from([1, 3, 8])), "n_layer": draw(LAYERS)}
    found |= {"n_positions": draw(st.sampled_from([8, 40])), "layer_norm_epsilon": draw(EPS)}
    found |= {"tie_word_embeddings": draw(st.booleans()), "bos_token_id": None, "eos_token_id": None}
    if draw(st.booleans()):
        return "OpenAIGPTLMHeadModel", found | {"afn": draw(st.sampled_from(["gelu", "relu", "silu", "swish"]))}
    activation = draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh"]))
    return "GPT2LMHeadModel", found | {"activation_function": activation, "n_inner": draw(st.none() | INNER)}


@st.composite
def bert(draw: Any) -> Made:
    heads, names = draw(HEADS), ["MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification"]
    found = {"num_attention_heads": heads, "hidden_size": heads * draw(st.sampled_from([2, 3, 8]))}
    found |= {"num_hidden_layers": draw(LAYERS), "intermediate_size": draw(INNER), "layer_norm_eps": draw(EPS)}
    found |= {"type_vocab_size": draw(st.sampled_from([1, 2, 5])), "max_position_embeddings": 40}
    found |= {"hidden_act": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"]))}
    name = draw(st.sampled_from(["BertModel", *(f"BertFor{name}" for name in [*names, "QuestionAnswering"])]))
    return name, found | ({"num_labels": draw(LAYERS)} if "Classification" in name else {})


@st.composite
def marian(draw: Any) -> Made:
    heads, inner = draw(HEADS), draw(INNER)
    found = {"d_model": heads * draw(st.sampled_from([2, 4, 8])), "max_position_embeddings": 40}
    found |= {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    found |= {f"{stack}_ffn_dim": inner for stack in ("encoder", "decoder")}
    found |= {"encoder_layers": draw(LAYERS), "decoder_layers": draw(LAYERS), "scale_embedding": draw(st.booleans())}
    found |= {"activation_function": draw(st.sampled_from(["gelu", "relu", "swish", "gelu_new"]))}
    shared = draw(st.booleans())
    found |= {"share_encoder_decoder_embeddings": shared, "pad_token_id": 5, "eos_token_id": 0}
    found |= {"decoder_vocab_size": WORDS if shared else draw(st.sampled_from([83, WORDS, 120]))}
    return "MarianMTModel", found | {"decoder_start_token_id": 3, "forced_eos_token_id": None}


@pytest.mark.parametrize("family", [llama, gpt, bert, marian])
def test_any_configuration_gives_the_same_outputs_in_and_out(family: Any) -> None:
    @settings(max_examples=COUNT, deadline=None)
    @given(made=family(), seed=st.integers(0, 1000), length=st.integers(1, 8) | st.just(40))
    def same(made: Made, seed: int, length: int) -> None:
        torch.manual_seed(seed)
        name, found = made
        kind = getattr(transformers, name)
        theirs = kind(kind.config_class(vocab_size=WORDS, attn_implementation="eager", **found)).eval()
        disturb(theirs, 0.3)
        with tempfile.TemporaryDirectory() as place:
            theirs.save_pretrained(Path(place, "theirs"))
            import_model(Path(place, "theirs"), Path(place, "ours"))
            loaded = load_model(Path(place, "ours"))
            export_model(loaded, Path(place, "back"), "hf")
            back = kind.from_pretrained(Path(place, "back"), attn_implementation="eager").eval()
            ids = torch.randint(min(WORDS, found.get("decoder_vocab_size", WORDS)), (2, length))
            ids = ids[:, : loaded.config.max_positions]
            mine = ours(loaded.network, ids, ids)
            for other in (theirs, back):
                for key, expected in outputs(other, ids, ids).items():
                    atol = 2e-5 * max(1.0, float(expected.abs().max()))
                    torch.testing.assert_close(mine[key], expected, atol=atol, rtol=0)

    same()
