"""Random configurations of every architecture give the outputs of transformers after import and after export.

CLEARHEAD_CONFIGS=300 sets the number per architecture instead of 10.
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
ModelSettings = tuple[str, dict[str, Any]]


@st.composite
def llama(draw: Any) -> ModelSettings:
    heads, head_dim = draw(HEADS), draw(st.sampled_from([2, 4, 6, 16]))
    rope = {"rope_type": "default", "rope_theta": draw(st.sampled_from([2.0, 100.0, 1e4, 5e5]))}
    if draw(st.booleans()):
        low = draw(st.sampled_from([0.5, 1.0, 2.0]))
        rope |= {"rope_type": "llama3", "factor": draw(st.sampled_from([1.0, 2.0, 32.0])), "low_freq_factor": low}
        rope |= {"high_freq_factor": low * draw(st.sampled_from([1.5, 4.0]))}
        rope |= {"original_max_position_embeddings": draw(st.sampled_from([4, 20, 64]))}
    values = {
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "rope_parameters": rope,
        "rms_norm_eps": draw(EPS),
    }
    values |= {"num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))}
    values |= {"hidden_size": heads * draw(st.sampled_from([head_dim, 5, 12])), "intermediate_size": draw(INNER)}
    values |= {"num_hidden_layers": draw(LAYERS), "tie_word_embeddings": draw(st.booleans())}
    values |= {
        "max_position_embeddings": draw(st.sampled_from([8, 40])),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if draw(st.booleans()):
        return "MistralForCausalLM", values | {"sliding_window": draw(st.sampled_from([None, 1, 2, 5, 100]))}
    return "LlamaForCausalLM", values


@st.composite
def qwen(draw: Any) -> ModelSettings:
    values = draw(llama())[1]
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": draw(st.sampled_from([100.0, 1e6]))}
    model = draw(st.sampled_from(["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"]))
    if model != "Qwen3ForCausalLM":
        values["hidden_size"] = values["num_attention_heads"] * values.pop("head_dim")
    values["sliding_window"] = draw(st.sampled_from([1, 3, 100]))
    if model == "Phi3ForCausalLM":
        return model, values | {"pad_token_id": None}
    return model, values | {
        "use_sliding_window": draw(st.booleans()),
        "max_window_layers": draw(st.integers(0, 2)),
    }


@st.composite
def gpt(draw: Any) -> ModelSettings:
    heads = draw(HEADS)
    values = {"n_head": heads, "n_embd": heads * draw(st.sampled_from([1, 3, 8])), "n_layer": draw(LAYERS)}
    values |= {"n_positions": draw(st.sampled_from([8, 40])), "layer_norm_epsilon": draw(EPS)}
    values |= {"tie_word_embeddings": draw(st.booleans()), "bos_token_id": None, "eos_token_id": None}
    if draw(st.booleans()):
        return "OpenAIGPTLMHeadModel", values | {"afn": draw(st.sampled_from(["gelu", "relu", "silu", "swish"]))}
    activation = draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu", "gelu_pytorch_tanh"]))
    return "GPT2LMHeadModel", values | {"activation_function": activation, "n_inner": draw(st.none() | INNER)}


@st.composite
def bert(draw: Any) -> ModelSettings:
    heads, names = draw(HEADS), ["MaskedLM", "PreTraining", "SequenceClassification", "TokenClassification"]
    values = {"num_attention_heads": heads, "hidden_size": heads * draw(st.sampled_from([2, 3, 8]))}
    values |= {"num_hidden_layers": draw(LAYERS), "intermediate_size": draw(INNER), "layer_norm_eps": draw(EPS)}
    values |= {"type_vocab_size": draw(st.sampled_from([1, 2, 5])), "max_position_embeddings": 40}
    values |= {"hidden_act": draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"]))}
    name = draw(st.sampled_from(["BertModel", *(f"BertFor{name}" for name in [*names, "QuestionAnswering"])]))
    return name, values | ({"num_labels": draw(LAYERS)} if "Classification" in name else {})


@st.composite
def roberta(draw: Any) -> ModelSettings:
    name, values = draw(bert().filter(lambda drawn: "PreTraining" not in drawn[0]))
    values["pad_token_id"] = draw(st.sampled_from([0, 1, 3]))
    values["max_position_embeddings"] += values["pad_token_id"] + 1
    if "MaskedLM" in name:
        values["hidden_act"] = "gelu"
    return name.replace("Bert", draw(st.sampled_from(["Roberta", "XLMRoberta", "Camembert"]))), values


@st.composite
def distilbert(draw: Any) -> ModelSettings:
    name, bert_values = draw(bert().filter(lambda drawn: "PreTraining" not in drawn[0]))
    names = {"num_attention_heads": "n_heads", "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim"}
    names |= {"hidden_size": "dim", "hidden_act": "activation", "max_position_embeddings": "max_position_embeddings"}
    values = {names[key]: value for key, value in bert_values.items() if key in names}
    return name.replace("Bert", "DistilBert"), values | (
        {"num_labels": bert_values["num_labels"]} if "num_labels" in bert_values else {}
    )


@st.composite
def modernbert(draw: Any) -> ModelSettings:
    heads = draw(HEADS)
    values = {"num_attention_heads": heads, "hidden_size": heads * draw(st.sampled_from([2, 4, 8]))}
    values |= {"num_hidden_layers": draw(st.integers(1, 5)), "intermediate_size": draw(INNER), "norm_eps": draw(EPS)}
    values |= {"local_attention": draw(st.sampled_from([2, 4, 10])), "max_position_embeddings": 40}
    values |= {"global_attn_every_n_layers": draw(st.integers(1, 3))}
    theta, local = draw(st.sampled_from([100.0, 160000.0])), draw(st.sampled_from([50.0, 10000.0]))
    rope = {"full_attention": theta, "sliding_attention": local}
    values["rope_parameters"] = {key: {"rope_type": "default", "rope_theta": each} for key, each in rope.items()}
    values |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    return draw(st.sampled_from(["ModernBertModel", "ModernBertForMaskedLM"])), values


@st.composite
def marian(draw: Any, pegasus: bool = False) -> ModelSettings:
    heads, inner = draw(HEADS), draw(INNER)
    values = {"d_model": heads * draw(st.sampled_from([2, 4, 8])), "max_position_embeddings": 40}
    values |= {f"{stack}_attention_heads": heads for stack in ("encoder", "decoder")}
    values |= {f"{stack}_ffn_dim": inner for stack in ("encoder", "decoder")}
    values |= {
        "encoder_layers": draw(LAYERS),
        "decoder_layers": draw(LAYERS),
        "scale_embedding": draw(st.booleans()),
    }
    values |= {"activation_function": draw(st.sampled_from(["gelu", "relu", "swish", "gelu_new"]))}
    shared = draw(st.booleans())
    values |= {"share_encoder_decoder_embeddings": shared, "pad_token_id": 5, "eos_token_id": 0}
    values |= {"decoder_vocab_size": WORDS if shared else draw(st.sampled_from([83, WORDS, 120]))}
    values |= {"decoder_start_token_id": 3, "forced_eos_token_id": None}
    if pegasus:
        return "PegasusForConditionalGeneration", {
            key: value
            for key, value in values.items()
            if key not in ("share_encoder_decoder_embeddings", "decoder_vocab_size")
        }
    return "MarianMTModel", values


def pegasus() -> Any:
    return marian(pegasus=True)


@st.composite
def bart(draw: Any) -> ModelSettings:
    _, values = draw(marian(pegasus=True))
    names = ["BartForConditionalGeneration", "MBartForConditionalGeneration", "M2M100ForConditionalGeneration"]
    name = draw(st.sampled_from(names))
    if name.startswith("M2M"):
        values["d_model"] = 4 * max(1, values["d_model"] // 4) * values["encoder_attention_heads"]
    return name, values | {"pad_token_id": draw(st.sampled_from([0, 1, 2])) if name.startswith("M2M") else 1}


@pytest.mark.parametrize("family", [llama, qwen, gpt, bert, roberta, distilbert, modernbert, marian, pegasus, bart])
def test_any_configuration_gives_the_same_outputs_after_import_and_export(family: Any) -> None:
    @settings(max_examples=COUNT, deadline=None)
    @given(drawn=family(), seed=st.integers(0, 1000), length=st.integers(1, 8) | st.just(40))
    def check(drawn: ModelSettings, seed: int, length: int) -> None:
        torch.manual_seed(seed)
        name, values = drawn
        model_class = getattr(transformers, name)
        theirs = model_class(model_class.config_class(vocab_size=WORDS, attn_implementation="eager", **values)).eval()
        disturb(theirs, 0.3)
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(Path(folder, "theirs"))
            import_model(Path(folder, "theirs"), Path(folder, "ours"))
            loaded = load_model(Path(folder, "ours"))
            export_model(loaded, Path(folder, "back"), "hf")
            back = model_class.from_pretrained(Path(folder, "back"), attn_implementation="eager").eval()
            ids = torch.randint(4, min(WORDS, values.get("decoder_vocab_size", WORDS)), (2, length))
            ids = ids[:, : loaded.config.max_positions]
            actual = ours(loaded.network, ids, ids)
            for other in (theirs, back):
                for key, expected in outputs(other, ids, ids).items():
                    atol = 2e-5 * max(1.0, float(expected.abs().max()))
                    torch.testing.assert_close(actual[key], expected, atol=atol, rtol=0)

    check()
