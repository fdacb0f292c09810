"""Architectures that we know and do not support: the feature that the model core does not have."""

from __future__ import annotations

from collections.abc import Iterable

from clearhead.errors import UserError

# By feature: model_type of Hugging Face, and general.architecture of GGUF where it has another name.
FEATURES: dict[str, tuple[str, ...]] = {
    "norms with weights around zero": ("gemma", "recurrent_gemma"),
    "soft caps of logits": ("gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma4"),
    "mixtures of experts": (
        *("mixtral", "qwen2_moe", "qwen2moe", "qwen3_moe", "qwen3moe", "qwen3_next", "qwen3next", "deepseek_v2"),
        *("deepseek2", "deepseek_v3", "olmoe", "phimoe", "gpt_oss", "gpt-oss", "granitemoe", "dbrx", "jamba", "llama4"),
        *("llama4_text", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax", "nllb-moe", "switch_transformers"),
    ),
    "relative position biases": ("t5", "mt5", "umt5", "longt5", "mpnet", "t5encoder"),
    "parallel residuals": (
        "gpt_neox",
        "gptneox",
        "gptj",
        "codegen",
        "falcon",
        "phi",
        "phi2",
        "cohere",
        "cohere2",
        "command-r",
    ),
    "norms after attention and feed-forward": ("olmo2", "olmo3", "exaone4"),
    "norms without weights": ("olmo",),
    "layers without positions": ("smollm3",),
    "position biases by distance (ALiBi)": ("bloom", "mpt", "jais", "jina_bert"),
    "disentangled attention": ("deberta", "deberta-v2"),
    "layers that share their weights": ("albert",),
    "an embedding of another dim than the layers": ("electra",),
    "partial rotary positions": ("stablelm", "glm", "glm4", "chatglm", "nemotron", "persimmon"),
    "multipliers of embeddings, residuals or logits": ("granite", "minicpm", "minicpm3"),
    "global tokens of sparse attention": ("longformer", "led", "big_bird", "bigbird_pegasus"),
    "two-stream attention": ("xlnet",),
    "state-space layers": ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "zamba2", "bamba", "nemotron_h", "rwkv"),
    "audio input": ("whisper", "wav2vec2", "hubert", "speech_to_text", "seamless_m4t", "seamless_m4t_v2"),
    "image input": (
        *("vit", "clip", "siglip", "llava", "llava_next", "qwen2_vl", "qwen2vl", "qwen2_5_vl", "qwen3_vl", "mllama"),
        *("idefics3", "smolvlm", "paligemma", "pixtral", "mistral3", "vision-encoder-decoder", "blip-2"),
    ),
}


def refusal(where: object, key: str, architecture: str, supported: Iterable[str]) -> UserError:
    """Return the error for an architecture, with the feature that it needs if we know it."""
    names = ", ".join(supported)
    feature = next((feature for feature, known in FEATURES.items() if architecture in known), None)
    if feature is None:
        return UserError(f"{where}: {key}: {architecture!r:.40} is not supported; supported: {names}")
    return UserError(f"{where}: {key}: {architecture!r:.40} needs {feature}, not supported; supported: {names}")
