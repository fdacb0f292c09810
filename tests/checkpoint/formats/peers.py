"""Tiny random models of every supported Hugging Face architecture, and the outputs of both libraries."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model.peers import disturb

WORDS = 97
BERT = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80}
BERT |= {"max_position_embeddings": 64}
ROBERTA = {**BERT, "pad_token_id": 1}
DISTILBERT = {"dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80, "max_position_embeddings": 64}
MODERNBERT = {**BERT, "local_attention": 6, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}
MODERNBERT |= {"bos_token_id": None, "eos_token_id": None}
GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "bos_token_id": None, "eos_token_id": None}
LLAMA = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 40}
MARIAN = {"d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 80}
MARIAN |= {"decoder_attention_heads": 4, "decoder_ffn_dim": 80, "max_position_embeddings": 64, "scale_embedding": True}
MARIAN |= {"activation_function": "swish", "eos_token_id": 0, "forced_eos_token_id": None}

PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", BERT),
    "bert-pretraining": ("BertForPreTraining", BERT),
    "bert-lm": ("BertForMaskedLM", BERT),
    "bert-classes": ("BertForSequenceClassification", {**BERT, "num_labels": 5}),
    "bert-tags": ("BertForTokenClassification", {**BERT, "num_labels": 3}),
    "bert-span": ("BertForQuestionAnswering", BERT),
    "roberta": ("RobertaModel", ROBERTA),
    "roberta-lm": ("RobertaForMaskedLM", {**ROBERTA, "type_vocab_size": 1}),
    "roberta-classes": ("RobertaForSequenceClassification", {**ROBERTA, "num_labels": 5, "layer_norm_eps": 1e-5}),
    "xlm-roberta-tags": ("XLMRobertaForTokenClassification", {**ROBERTA, "num_labels": 3}),
    "camembert-span": ("CamembertForQuestionAnswering", ROBERTA),
    "distilbert": ("DistilBertModel", DISTILBERT),
    "distilbert-lm": ("DistilBertForMaskedLM", DISTILBERT),
    "distilbert-classes": ("DistilBertForSequenceClassification", {**DISTILBERT, "num_labels": 5}),
    "distilbert-tags": ("DistilBertForTokenClassification", {**DISTILBERT, "num_labels": 3, "activation": "relu"}),
    "distilbert-span": ("DistilBertForQuestionAnswering", DISTILBERT),
    "modernbert": ("ModernBertModel", MODERNBERT),
    "modernbert-lm": ("ModernBertForMaskedLM", {**MODERNBERT, "num_hidden_layers": 5}),
    "gpt": ("OpenAIGPTLMHeadModel", GPT),
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt2-relu": ("GPT2LMHeadModel", {**GPT, "n_inner": 80, "activation_function": "relu"}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama2": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}),
    "llama3.2": (
        "LlamaForCausalLM",
        {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    ),
    "llama-head-dim": ("LlamaForCausalLM", {**LLAMA, "num_key_value_heads": 2, "head_dim": 24}),
    "mistral": ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": 5}),
    "mistral-full": ("MistralForCausalLM", {**LLAMA, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 2}),
    "qwen2.5": ("Qwen2ForCausalLM", {**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {**LLAMA, "num_key_value_heads": 4, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5}
        | {"max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "num_key_value_heads": 2, "head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        {**LLAMA, "num_key_value_heads": 4, "head_dim": 16, "use_sliding_window": True, "sliding_window": 5}
        | {"max_window_layers": 0},
    ),
    "phi3": ("Phi3ForCausalLM", {**LLAMA, "num_key_value_heads": 2, "eos_token_id": 3, "pad_token_id": None}),
    "phi3-window": ("Phi3ForCausalLM", {**LLAMA, "sliding_window": 5, "tie_word_embeddings": True, "pad_token_id": 0}),
    "marian": ("MarianMTModel", {**MARIAN, "pad_token_id": 96, "decoder_start_token_id": 96}),
    "marian-two": (
        "MarianMTModel",
        {**MARIAN, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 83, "pad_token_id": 82}
        | {"decoder_start_token_id": 82},
    ),
    "pegasus": ("PegasusForConditionalGeneration", {**MARIAN, "pad_token_id": 96, "decoder_start_token_id": 96}),
}
PEERS |= {
    "bart": ("BartForConditionalGeneration", {**MARIAN, "pad_token_id": 1, "decoder_start_token_id": 2}),
    "mbart": ("MBartForConditionalGeneration", {**MARIAN, "pad_token_id": 1, "decoder_start_token_id": 2}),
    "m2m100": ("M2M100ForConditionalGeneration", {**MARIAN, "pad_token_id": 1, "decoder_start_token_id": 2}),
}
TRANSLATORS = [name for name, (model, _) in PEERS.items() if "Conditional" in model or "MT" in model]
DECODERS = [name for name, (model, _) in PEERS.items() if "LM" in model and "bert" not in model.lower()]


def peer(name: str) -> Any:
    """Return a model of transformers with noise on every weight, in evaluation mode."""
    model, settings = PEERS[name]
    kind = getattr(transformers, model)
    model = kind(kind.config_class(vocab_size=WORDS, attn_implementation="eager", **settings))
    disturb(model, 0.12)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model.eval()


def saved(name: str, folder: Path, **options: Any) -> Any:
    """Save a model with transformers and return it."""
    model = peer(name)
    model.save_pretrained(folder, **options)
    return model


@torch.no_grad()
def outputs(model: Any, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every output of their model."""
    if model.config.is_encoder_decoder:
        return {"lm": model(input_ids=ids, decoder_input_ids=target).logits}
    results = model(input_ids=ids)
    names = {
        "last_hidden_state": "hidden",
        "pooler_output": "pooled",
        "prediction_logits": "lm",
        "seq_relationship_logits": "next-sentence",
        "start_logits": "start",
        "end_logits": "end",
    }
    tensors = {names[name]: value for name, value in results.items() if name in names}
    if "logits" in results:
        heads = {"SequenceClassification": "classes", "TokenClassification": "tags"}
        kind = type(model).__name__
        tensors[next((ours for theirs, ours in heads.items() if kind.endswith(theirs)), "lm")] = results.logits
    return tensors


@torch.no_grad()
def ours(network: Any, ids: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every output of our network."""
    config, heads = network.config, network.heads
    if config.family == "encoder-decoder":
        return {"lm": network(ids, target)}
    if config.family == "decoder":
        return {"lm": network(ids)}
    hidden = network.encode(ids)
    results = {"hidden": hidden}
    if config.pooler:
        results["pooled"] = heads.pool(hidden)
    if heads.lm_head is not None:
        results["lm"] = network.logits(hidden)
    if heads.next_sentence is not None:
        results["next-sentence"] = heads.next_sentence(heads.pool(hidden))
    if heads.classes is not None:
        results["classes"] = heads.classes(heads.pool(hidden))
    if heads.tags is not None:
        results["tags"] = heads.tags(hidden)
    if heads.span is not None:
        results["start"], results["end"] = heads.span(hidden).unbind(-1)
    return results
