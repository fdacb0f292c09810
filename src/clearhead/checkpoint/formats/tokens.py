"""Tokenizers of Hugging Face folders, and ours for them: files, special tokens, what stands around a text."""

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
from clearhead.checkpoint.folder import ONE, TWO, Loaded, write_tokenizers
from clearhead.checkpoint.formats.fields import Fields
from clearhead.config import ModelConfig
from clearhead.errors import UserError
from clearhead.files import read_text
from clearhead.text import Tokenizer, from_bert

log = logging.getLogger("clearhead")
NAMES = {  # our roles in their words
    "begin": "bos_token",
    "end": "eos_token",
    "pad": "pad_token",
    "unknown": "unk_token",
    "mask": "mask_token",
    "class": "cls_token",
    "separator": "sep_token",
}


def hugging_face_tokenizer(folder: Path) -> tuple[Tokenizer, ...]:
    """The tokenizer of a folder, or none, with a warning: a model can be used through ids alone."""
    if all((folder / name).is_file() for name in TWO):
        return tuple(Tokenizer.load(folder / name) for name in TWO)
    file = folder / "tokenizer_config.json"
    fields = Fields(disk.read_json(file) if file.is_file() else {}, file)
    if (folder / ONE[0]).is_file():
        tokenizer = Tokenizer.load(folder / ONE[0])
        normalizer = tokenizer.engine.normalizer
        if isinstance(normalizer, BertNormalizer) and fields.text("tokenizer_class", "").startswith("Bert"):
            fields.must(f"another case than that of {ONE[0]}", "do_lower_case", normalizer.lowercase)
        return (tokenizer,)
    if (folder / "vocab.txt").is_file():
        return (from_bert(folder, lowercase=fields.flag("do_lower_case", True)),)
    log.warning("%s has neither tokenizer.json nor vocab.txt: the model comes without a tokenizer", folder)
    return ()


def special_ids(folder: Path, fields: Fields, config: ModelConfig, tokenizers: tuple[Tokenizer, ...]) -> dict[str, Any]:
    """What begins and ends a text, as the folder says; and its chat template."""
    extra: dict[str, Any] = {}
    generation = folder / "generation_config.json"
    later = disk.read_json(generation) if generation.is_file() else {}

    def ids(key: str) -> list[int]:
        found = later.get(key, fields.data.get(key))
        rows = found if isinstance(found, list) else [] if found is None else [found]
        return [row for row in rows if type(row) is int and 0 <= row < config.target_vocab]

    if config.family == "encoder-decoder":
        Fields(later, generation).must("a first word that is given", "forced_bos_token_id")
        extra["begin"] = ids("decoder_start_token_id")[:1]
        extra["banned"] = _rows(later.get("bad_words_ids", fields.data.get("bad_words_ids")), config.target_vocab)
        extra["banned"] += [row for number in ids("pad_token_id") if (row := [number]) not in extra["banned"]]
        extra["pad"] = next(iter(ids("pad_token_id")), None)
    elif tokenizers:
        extra["begin"] = _in_front(tokenizers[0], folder / ONE[0])
    if found := ids("eos_token_id"):
        extra["ends"] = found
    if template := chat_template(folder):
        extra["chat_template"] = template
    return {key: value for key, value in extra.items() if value not in (None, []) or key == "begin"}


def _rows(found: Any, size: int) -> list[list[int]]:
    """Rows of ids, those that are such."""
    rows = [row for row in found if isinstance(row, list) and row] if isinstance(found, list) else []
    return [row for row in rows if all(type(number) is int and 0 <= number < size for number in row)]


def _in_front(tokenizer: Tokenizer, where: Path) -> list[int]:
    """What a tokenizer puts before a text by itself; read, not tried, as the engine dies of a damaged one."""
    engine = tokenizer.engine.post_processor
    found = [] if engine is None else _first(json.loads(engine.__getstate__()), where)
    if any(not 0 <= number < len(tokenizer) for number in found):
        raise UserError(f"{where}: post_processor: {found!s:.60}: not all are tokens")
    return found


def _first(step: dict[str, Any], where: Path) -> list[int]:
    """What one step puts in front; of several, the last stands outermost."""
    if "processors" in step:
        return [number for each in reversed(step["processors"]) for number in _first(each, where)]
    if "cls" in step:  # of BERT and RoBERTa
        return [step["cls"][1]]
    parts = takewhile(lambda part: "SpecialToken" in part, step.get("single", ()))
    names = [part["SpecialToken"]["id"] for part in parts]
    if unknown := set(names) - step.get("special_tokens", {}).keys():
        raise UserError(f"{where}: post_processor: {min(unknown)!r:.40} is none of its special tokens")
    return [number for name in names for number in step["special_tokens"][name]["ids"]]


def chat_template(folder: Path) -> str | None:
    """The template by which a conversation becomes one text."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    file = folder / "tokenizer_config.json"
    found = disk.read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def hugging_face_files(loaded: Loaded, draft: Path) -> dict[str, Any]:
    """Write the tokenizers' files; returns the ids that their config.json names, None where there is none."""
    family, roles = loaded.config.family, loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    begins, ends = begin_ids(loaded), end_ids(loaded)
    write_tokenizers(draft, [framed(tokenizer, loaded) for tokenizer in loaded.tokenizers])
    if loaded.tokenizers:
        named = {NAMES[role]: number for role, number in roles.items() if role in NAMES}
        if family == "decoder":  # what the model was made with, whatever else the vocabulary has
            named |= {name: ids[0] for name, ids in (("bos_token", begins), ("eos_token", ends)) if ids}
        tokens = {name: loaded.tokenizers[-1].token(number) for name, number in named.items()}
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
        about |= {"clean_up_tokenization_spaces": False, "model_max_length": loaded.config.max_positions}
        if template := loaded.extra.get("chat_template"):
            about["chat_template"] = template
        disk.write_json(draft / "tokenizer_config.json", about)
    padding = {"pad_token_id": loaded.extra.get("pad", roles.get("pad"))}
    if family == "encoder":
        return padding
    ids = padding | {"eos_token_id": ends[0] if len(ends) == 1 else ends or None}
    ids["decoder_start_token_id" if family == "encoder-decoder" else "bos_token_id"] = begins[0] if begins else None
    generation = ids | {"bad_words_ids": loaded.extra.get("banned")}
    disk.write_json(
        draft / "generation_config.json", {name: value for name, value in generation.items() if value is not None}
    )
    return ids


def begin_ids(loaded: Loaded) -> list[int]:
    """What our verbs put before a text that is to be written."""
    roles = loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    given = [roles["begin"]] if "begin" in roles else [roles["end"]] if "end" in roles else []
    return list(loaded.extra.get("begin", given))


def end_ids(loaded: Loaded) -> list[int]:
    """What ends a text."""
    roles = loaded.tokenizers[-1].roles if loaded.tokenizers else {}
    return list(loaded.extra.get("ends", [roles["end"]] if "end" in roles else []))


def every_token(tokenizer: Tokenizer, size: int) -> list[str]:
    """How each of `size` rows is written; a model may have more of them than its tokenizer."""
    tokens = [f"[unused {number}]" for number in range(size)]
    for token, number in tokenizer.vocabulary.items():
        tokens[number] = token
    return tokens


def framed(tokenizer: Tokenizer, loaded: Loaded) -> Engine:
    """The engine with what our verbs put around a text, for libraries that leave this to the tokenizer."""
    engine, roles = Engine.from_str(tokenizer.engine.to_str()), tokenizer.roles
    if engine.post_processor is not None:
        return engine
    frame: tuple[Sequence[int | None], Sequence[int | None]]
    match loaded.config.family:
        case "encoder":
            frame = [roles.get("class")], [roles.get("separator")]
        case "encoder-decoder":
            frame = [], [roles.get("end")] if loaded.extra.get("source_end", True) else []
        case _:
            frame = begin_ids(loaded), []
    before, behind = ([tokenizer.token(number) for number in side if number is not None] for side in frame)
    if before or behind:
        special = [(token, tokenizer.vocabulary[token]) for token in {*before, *behind}]
        pair = [*before, "$A", *behind, "$B:1", *(f"{token}:1" for token in behind)]
        engine.post_processor = TemplateProcessing(single=[*before, "$A", *behind], pair=pair, special_tokens=special)
    return engine
