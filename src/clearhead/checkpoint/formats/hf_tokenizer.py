"""Tokenizers and special tokens of Hugging Face folders, in both directions."""

import json
import logging
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Engine
from tokenizers.normalizers import BertNormalizer
from tokenizers.processors import TemplateProcessing

from clearhead.checkpoint import disk
from clearhead.checkpoint.formats.config_fields import Fields
from clearhead.checkpoint.formats.language_codes import default_languages, language_codes
from clearhead.checkpoint.formats.sampling_defaults import read_sampling, write_sampling
from clearhead.checkpoint.formats.sentencepiece import m2m100_tokenizer, marian_tokenizers
from clearhead.checkpoint.model_folder import SEPARATE_TOKENIZERS, SHARED_TOKENIZER, LoadedModel, write_tokenizers
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.text import Tokenizer, from_bert

log = logging.getLogger("clearhead")
TOKEN_NAMES = {  # our roles to Hugging Face's names
    "begin": "bos_token",
    "end": "eos_token",
    "pad": "pad_token",
    "unknown": "unk_token",
    "mask": "mask_token",
    "class": "cls_token",
    "separator": "sep_token",
}
BART_CLASSES = ("BartTokenizer", "BartTokenizerFast")


def read_hf_tokenizer(folder: Path) -> tuple[Tokenizer, ...]:
    """Read the tokenizer of a folder; warn if there is none, as a model can be used with ids alone."""
    if all((folder / name).is_file() for name in SEPARATE_TOKENIZERS):
        return tuple(Tokenizer.load(folder / name) for name in SEPARATE_TOKENIZERS)
    file = folder / "tokenizer_config.json"
    fields = Fields(disk.read_json(file) if file.is_file() else {}, file)
    if (folder / SHARED_TOKENIZER[0]).is_file():
        tokenizer = Tokenizer.load(folder / SHARED_TOKENIZER[0])
        normalizer = tokenizer.engine.normalizer
        if isinstance(normalizer, BertNormalizer) and fields.string("tokenizer_class", "").startswith("Bert"):
            fields.require(f"another value than in {SHARED_TOKENIZER[0]}", "do_lower_case", normalizer.lowercase)
        return (tokenizer,)
    if (folder / "vocab.txt").is_file():
        return (from_bert(folder, lowercase=fields.flag("do_lower_case", True)),)
    if all((folder / name).is_file() for name in ("source.spm", "target.spm", "vocab.json")):
        return marian_tokenizers(folder)
    if (folder / "vocab.json").is_file() and (model := next(folder.glob("sentencepiece*.model"), None)) is not None:
        return (m2m100_tokenizer(folder, model),)
    log.warning("%s has neither tokenizer.json nor vocab.txt: the model has no tokenizer", folder)
    return ()


def special_ids(folder: Path, fields: Fields, config: ModelConfig, tokenizers: tuple[Tokenizer, ...]) -> dict[str, Any]:
    """Return begin, end, pad and banned tokens and the chat template for our config.json."""
    extra: dict[str, Any] = {}
    generation_file = folder / "generation_config.json"
    generation = disk.read_json(generation_file) if generation_file.is_file() else {}

    def ids(key: str) -> list[int]:
        value = generation.get(key, fields.data.get(key))
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [each for each in values if type(each) is int and 0 <= each < config.target_vocab]

    if config.family == "encoder-decoder":
        forced = ids("forced_bos_token_id")[:1]
        if languages := language_codes(tokenizers[0]) if tokenizers else {}:
            file = folder / "tokenizer_config.json"
            settings = Fields(disk.read_json(file) if file.is_file() else {}, file)
            extra |= {"languages": languages} | default_languages(settings, languages, forced)
            forced = []
        if tokenizers:  # a language code of the post-processor is chosen for every text
            prefix = _prefix_ids(tokenizers[0], folder / SHARED_TOKENIZER[0]) or _prefix_of_class(folder, tokenizers[0])
            extra["source_begin"] = [each for each in prefix if each not in languages.values()]
        extra["begin"] = ids("decoder_start_token_id")[:1] + forced
        banned = generation.get("bad_words_ids", fields.data.get("bad_words_ids"))
        extra["banned_ids"] = _valid_sequences(banned, config.target_vocab)
        extra["banned_ids"] += [each for pad in ids("pad_token_id") if (each := [pad]) not in extra["banned_ids"]]
        extra["pad"] = next(iter(ids("pad_token_id")), None)
    elif tokenizers:
        extra["begin"] = _prefix_ids(tokenizers[0], folder / SHARED_TOKENIZER[0])
    if eos := ids("eos_token_id"):
        extra["eos_ids"] = eos
    if sampling := read_sampling(generation, generation_file):
        extra["sampling"] = sampling
    if template := chat_template(folder):
        extra["chat_template"] = template
    return {key: value for key, value in extra.items() if value not in (None, []) or key == "begin"}


def _valid_sequences(value: Any, size: int) -> list[list[int]]:
    """Return the non-empty sequences of valid ids in a list."""
    sequences = [each for each in value if isinstance(each, list) and each] if isinstance(value, list) else []
    return [each for each in sequences if all(type(number) is int and 0 <= number < size for number in each)]


def _prefix_ids(tokenizer: Tokenizer, where: Path) -> list[int]:
    """Return the ids that a post-processor puts before a text, without running it: a damaged one can crash."""
    processor = tokenizer.engine.post_processor
    ids = [] if processor is None else _prefix_of_step(json.loads(processor.__getstate__()), where)
    if any(not 0 <= number < len(tokenizer) for number in ids):
        raise UserError(f"{where}: post_processor: {ids!s:.60}: ids outside the vocabulary")
    return ids


def _prefix_of_step(step: dict[str, Any], where: Path) -> list[int]:
    """Return the prefix of a post-processor; in a sequence of them, the last is outermost."""
    if "processors" in step:
        return [number for each in reversed(step["processors"]) for number in _prefix_of_step(each, where)]
    if "cls" in step:  # BERT and RoBERTa
        return [step["cls"][1]]
    parts = takewhile(lambda part: "SpecialToken" in part, step.get("single", ()))
    names = [part["SpecialToken"]["id"] for part in parts]
    if unknown := set(names) - step.get("special_tokens", {}).keys():
        raise UserError(f"{where}: post_processor: {min(unknown)!r:.40} is not one of its special tokens")
    return [number for name in names for number in step["special_tokens"][name]["ids"]]


def _prefix_of_class(folder: Path, tokenizer: Tokenizer) -> list[int]:
    """Return what transformers' class puts before a text when tokenizer.json has no post-processor."""
    file = folder / "tokenizer_config.json"
    settings = Fields(disk.read_json(file) if file.is_file() else {}, file)
    is_bart = settings.string("tokenizer_class", "") in BART_CLASSES
    return [tokenizer.vocabulary["<s>"]] if is_bart and "<s>" in tokenizer.vocabulary else []


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder, or None."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    file = folder / "tokenizer_config.json"
    template = disk.read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def write_hf_tokenizer(loaded: LoadedModel, folder: Path) -> dict[str, Any]:
    """Write tokenizer and generation_config.json; return the special ids for config.json, None if undefined."""
    family, roles = loaded.config.family, loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    begin, end = bos_ids(loaded), eos_ids(loaded)
    write_tokenizers(folder, [with_template(tokenizer, loaded) for tokenizer in loaded.tokenizers])
    if loaded.tokenizers:
        named = {TOKEN_NAMES[role]: number for role, number in roles.items() if role in TOKEN_NAMES}
        if family == "decoder":  # the ids that the model uses, whatever roles the tokenizer has
            named |= {name: ids[0] for name, ids in (("bos_token", begin), ("eos_token", end)) if ids}
        tokens = {name: loaded.tokenizers[-1].id_to_token(number) for name, number in named.items()}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
        settings |= {"clean_up_tokenization_spaces": False, "model_max_length": loaded.config.max_positions}
        if template := loaded.extra.get("chat_template"):
            settings["chat_template"] = template
        disk.write_json(folder / "tokenizer_config.json", settings)
    padding = {"pad_token_id": loaded.extra.get("pad", roles.get("pad"))}
    if family == "encoder":
        return padding
    ids = padding | {"eos_token_id": end[0] if len(end) == 1 else end or None}
    ids["decoder_start_token_id" if family == "encoder-decoder" else "bos_token_id"] = begin[0] if begin else None
    generation = ids | {"bad_words_ids": loaded.extra.get("banned_ids")}
    generation |= write_sampling(loaded.extra.get("sampling"))
    if family == "encoder-decoder":
        target = loaded.extra.get("languages", {}).get(loaded.extra.get("tgt_lang"))
        generation["forced_bos_token_id"] = target if target is not None else next(iter(begin[1:]), None)
    disk.write_json(
        folder / "generation_config.json", {name: value for name, value in generation.items() if value is not None}
    )
    return ids


def bos_ids(loaded: LoadedModel) -> list[int]:
    """Return the ids before a generated text."""
    roles = loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    default = [roles["begin"]] if "begin" in roles else [roles["end"]] if "end" in roles else []
    return list(loaded.extra.get("begin", default))


def eos_ids(loaded: LoadedModel) -> list[int]:
    """Return the ids that end a generated text."""
    roles = loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    return list(loaded.extra.get("eos_ids", [roles["end"]] if "end" in roles else []))


def vocabulary_list(tokenizer: Tokenizer, size: int) -> list[str]:
    """Return the tokens of ids 0 … size − 1, with placeholders for those that the tokenizer does not have."""
    tokens = [f"[unused {number}]" for number in range(size)]
    for token, number in tokenizer.vocabulary.items():
        tokens[number] = token
    return tokens


def with_template(tokenizer: Tokenizer, loaded: LoadedModel) -> Engine:
    """Return the engine with a post-processor that adds the special tokens which we add ourselves."""
    engine, roles = Engine.from_str(tokenizer.engine.to_str()), tokenizer.roles
    if engine.post_processor is not None:
        return engine
    template: tuple[Sequence[int | None], Sequence[int | None]]
    match loaded.config.family:
        case "encoder":
            template = [roles.get("class")], [roles.get("separator")]
        case "encoder-decoder":
            template = [], [roles.get("end")] if loaded.extra.get("source_end", True) else []
        case _:
            template = bos_ids(loaded), []
    before, after = ([tokenizer.id_to_token(number) for number in side if number is not None] for side in template)
    if before or after:
        special = [(token, tokenizer.vocabulary[token]) for token in {*before, *after}]
        pair = [*before, "$A", *after, "$B:1", *(f"{token}:1" for token in after)]
        engine.post_processor = TemplateProcessing(single=[*before, "$A", *after], pair=pair, special_tokens=special)
    return engine
