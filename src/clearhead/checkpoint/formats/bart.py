"""BART, mBART and M2M100 (NLLB): translators and other encoder-decoders that came from fairseq."""

from collections.abc import Set
from typing import Any

from clearhead.checkpoint.formats import marian
from clearhead.checkpoint.formats.adapter import Adapter
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.name_table import NameTable
from clearhead.config import ModelConfig
from clearhead.errors import UserError

OFFSET, DEFAULT_PAD = 2, 1  # learned positions start at 2; sinusoids after the id of padding
EMBEDDING: NameTable = {
    "*.embedding.positions.weight": "model.*.embed_positions.weight",
    "*.embedding.norm.*": "model.*.layernorm_embedding.*",
}
FINAL_NORM: NameTable = {"*.norm.*": "model.*.layer_norm.*"}
LEARNED = {"position": "learned", "position_offset": OFFSET, "embedding_norm": True, "output_bias": True}
# Of older files; the classes fix them.
IGNORED = (
    *("normalize_before", "add_final_layer_norm", "normalize_embedding", "static_position_embeddings", "prefix"),
    *("early_stopping", "no_repeat_ngram_size", "length_penalty", "min_length"),
)


def table(config: ModelConfig) -> NameTable:
    """Return Marian's table with learned positions, the norms of embeddings and the final norms."""
    return {**marian.SHARED_EMBEDDING, **EMBEDDING, **marian.TABLE, **FINAL_NORM}


def _settings(fields: Fields) -> dict[str, Any]:
    """Read what all three share: one vocabulary, one matrix of embeddings."""
    settings = marian.stack_settings(fields)
    fields.require("an untied output matrix", "tie_word_embeddings", True)
    fields.ignore(*IGNORED)
    return settings | {
        "vocab_size": fields.integer("vocab_size"),
        "tie": "all",
        "max_positions": fields.integer("max_position_embeddings", 1024),
    }


def bart_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a post-norm model."""
    return ModelConfig.build(_settings(fields) | LEARNED | {"norm_position": "post"}, where=str(fields.where))


def mbart_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a pre-norm model."""
    return ModelConfig.build(_settings(fields) | LEARNED | {"norm_position": "pre"}, where=str(fields.where))


def m2m100_from_hf(fields: Fields, names: Set[str]) -> ModelConfig:
    """Read the settings of a pre-norm model with sinusoids, and without the norm of embeddings."""
    padding = fields.integer("pad_token_id", DEFAULT_PAD)
    if fields.has("decoder_start_token_id") and fields.data["decoder_start_token_id"] == padding:
        raise UserError(
            f"{fields.where}: decoder_start_token_id: {padding} is also pad_token_id; translations that begin with "
            "padding are not supported"
        )
    settings = _settings(fields) | {
        "norm_position": "pre",
        "position": "sinusoidal",
        "sinusoid": "fairseq",
        "position_offset": padding + 1,
        "scale_embedding": fields.flag("scale_embedding", True),
    }
    return ModelConfig.build(settings, where=str(fields.where))


def _to_hf(config: ModelConfig, architecture: str, model_type: str) -> dict[str, Any]:
    settings = marian.to_hf(config) | {"architectures": [architecture], "model_type": model_type}
    return {key: settings[key] for key in settings if key not in marian.TWO_VOCABULARIES}


def bart_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    return _to_hf(config, "BartForConditionalGeneration", "bart")


def mbart_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face."""
    return _to_hf(config, "MBartForConditionalGeneration", "mbart")


def m2m100_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return config.json of Hugging Face; the id of padding is that before the first position."""
    settings = _to_hf(config, "M2M100ForConditionalGeneration", "m2m_100")
    return settings | {"pad_token_id": max(1, config.position_offset) - 1}


POSITIONS = (r"model\.(encoder|decoder)\.embed_positions\.weights?",)  # sinusoids
BART = Adapter("BART", ("bart",), "encoder-decoder", table, bart_from_hf, bart_to_hf, marian.renames)
MBART = Adapter("mBART", ("mbart",), "encoder-decoder", table, mbart_from_hf, mbart_to_hf, marian.renames)
M2M100 = Adapter(
    "M2M100", ("m2m_100",), "encoder-decoder", table, m2m100_from_hf, m2m100_to_hf, marian.renames, POSITIONS
)
