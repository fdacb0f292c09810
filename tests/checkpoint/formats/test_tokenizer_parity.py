"""Imported tokenizers give the ids of transformers on 2,000 lines in twenty scripts, with special tokens."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from clearhead.checkpoint import load_model
from clearhead.checkpoint.formats import import_model, sentencepiece
from clearhead.errors import UserError
from clearhead.predict import load
from clearhead.predict.encode_batch import rows
from clearhead.predict.requests import requests
from tests.checkpoint.formats import mutate
from tests.checkpoint.formats.scripts import lines

LINES = [line for line in lines(2000, seed=1) if line.strip()]
SIZE = 900
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SMALL: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 16, "max_position_embeddings": 514, "pad_token_id": 1}
SEQ2SEQ: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
SEQ2SEQ |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to train tokenizers on."""
    file = tmp_path_factory.mktemp("text") / "lines.txt"
    file.write_text("\n".join(lines(3000)), encoding="utf-8")
    return file


def trained(model: Any, pre_tokenizer: Any, trainer: Any) -> dict[str, Any]:
    """Train an engine and return the model of its tokenizer.json."""
    engine = tokenizers.Tokenizer(model)
    engine.pre_tokenizer = pre_tokenizer
    engine.train_from_iterator(lines(3000), trainer)
    settings: dict[str, Any] = json.loads(engine.to_str())["model"]
    return settings


def bpe() -> dict[str, Any]:
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=SPECIAL, show_progress=False)
    return trained(models.BPE(unk_token="<unk>"), pre_tokenizers.Metaspace(), trainer)


def test_nllb_gives_the_same_ids_with_language_codes(tmp_path: Path) -> None:
    model = bpe()
    codes = ["eng_Latn", "deu_Latn", "zho_Hans"]
    merges = [tuple(merge) for merge in model["merges"]]
    theirs = transformers.NllbTokenizer(model["vocab"], merges, extra_special_tokens=codes, src_lang="eng_Latn")
    theirs.save_pretrained(tmp_path / "theirs")
    size = len(theirs) + 3
    config = transformers.M2M100Config(vocab_size=size, max_position_embeddings=512, **SEQ2SEQ)
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = load(tmp_path / "ours", device="cpu")
    assert [*ours.extra["languages"]] == sorted(codes)
    for code in ("deu_Latn", "zho_Hans"):
        theirs.src_lang = code
        expected = theirs(LINES)["input_ids"]
        actual = [request.source for request in requests(ours, LINES, {"src_lang": code, "tgt_lang": "eng_Latn"})]
        assert actual == expected
    assert sum(3 in ids for ids in expected) < len(LINES) // 2, "mostly known tokens"


def test_xlm_roberta_gives_the_same_ids(tmp_path: Path) -> None:
    trainer = trainers.UnigramTrainer(
        vocab_size=SIZE, special_tokens=[*SPECIAL, "<mask>"], unk_token="<unk>", show_progress=False
    )
    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    vocab = [tuple(each) for each in trained(models.Unigram(), split, trainer)["vocab"]]
    theirs = transformers.XLMRobertaTokenizer(vocab)
    check_encoder(theirs, transformers.XLMRobertaModel, tmp_path)


def test_roberta_gives_the_same_ids(tmp_path: Path) -> None:
    trainer = trainers.BpeTrainer(vocab_size=SIZE, special_tokens=[*SPECIAL, "<mask>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    model = trained(models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainer)
    theirs = transformers.RobertaTokenizer(model["vocab"], [tuple(merge) for merge in model["merges"]])
    check_encoder(theirs, transformers.RobertaModel, tmp_path)


def check_encoder(theirs: Any, model: Any, folder: Path) -> None:
    """Compare the ids of texts and of pairs of texts."""
    theirs.save_pretrained(folder / "theirs")
    model(model.config_class(**SMALL)).save_pretrained(folder / "theirs")
    import_model(folder / "theirs", folder / "ours")
    ours = load(folder / "ours", device="cpu")
    assert [row.ids for row in rows(ours, LINES)] == theirs(LINES)["input_ids"]
    first, second = LINES[:200], LINES[-200:]
    assert [row.ids for row in rows(ours, first, second)] == theirs(first, second)["input_ids"]


def test_marian_reads_its_pair_of_sentencepiece_files(text: Path, tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    (tmp_path / "theirs").mkdir()
    for side, options in (("source", {"vocab_size": SIZE}), ("target", {"vocab_size": 1000})):
        spm.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(tmp_path / side),
            model_type="unigram",
            bos_id=-1,
            minloglevel=2,
            **options,
        )
        (tmp_path / f"{side}.model").rename(tmp_path / "theirs" / f"{side}.spm")
    pieces: dict[str, None] = {"</s>": None, "<unk>": None, ">>deu<<": None}
    for side in ("source", "target"):
        processor = spm.SentencePieceProcessor(model_file=str(tmp_path / "theirs" / f"{side}.spm"))
        pieces |= {processor.id_to_piece(n): None for n in range(processor.vocab_size())}
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "<pad>"])}
    (tmp_path / "theirs" / "vocab.json").write_text(json.dumps(vocabulary))
    size = len(vocabulary)
    config = transformers.MarianConfig(vocab_size=size, pad_token_id=size - 1, decoder_start_token_id=size - 1,
                                       eos_token_id=0, max_position_embeddings=512, **SEQ2SEQ)  # fmt: skip
    transformers.MarianMTModel(config).save_pretrained(tmp_path / "theirs")
    folder = tmp_path / "theirs"
    files = (str(folder / name) for name in ("source.spm", "target.spm", "vocab.json"))
    theirs = transformers.MarianTokenizer(*files)
    import_model(folder, tmp_path / "ours")
    ours = load(tmp_path / "ours", device="cpu")
    texts = [*LINES, *(f">>deu<< {line}" for line in LINES[:50])]
    expected = theirs(texts)["input_ids"]
    actual = [request.source or [] for request in requests(ours, texts, {})]
    different = [(a, b) for a, b in zip(actual, expected, strict=True) if a != b]
    assert len(different) <= len(texts) // 100
    assert all(sorted(a) == sorted(b) for a, b in different), "only ties: the same pieces in another order"
    target = load_model(tmp_path / "ours").tokenizers[-1]
    for ids in theirs(text_target=LINES[:200])["input_ids"]:
        assert target.decode(ids) == theirs.decode(ids, skip_special_tokens=True, use_source_tokenizer=False)


def test_damaged_sentencepiece_files_are_refused(text: Path, tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    spm.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "m"), vocab_size=SIZE, minloglevel=2)
    original, rng, refused = (tmp_path / "m.model").read_bytes(), random.Random(3), list[str]()
    vocabulary = ["<unk>", *sentencepiece.read_model(tmp_path / "m.model").pieces]
    (tmp_path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(vocabulary)}))
    (tmp_path / "target.spm").write_bytes(original)
    damages = (mutate.truncate, mutate.flip_bits, mutate.insert_huge_number, mutate.zero_tail, mutate.repeat)
    for number in range(200):
        (tmp_path / "source.spm").write_bytes(damages[number % len(damages)](original, rng))
        try:
            sentencepiece.marian_tokenizers(tmp_path)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert not any("\n" in message for message in refused)


def test_m2m100_reads_its_sentencepiece_file(text: Path, tmp_path: Path) -> None:
    spm = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    folder = tmp_path / "theirs"
    folder.mkdir()
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "m"), model_type="bpe", vocab_size=SIZE, minloglevel=2
    )
    (tmp_path / "m.model").rename(folder / "sentencepiece.bpe.model")
    processor = spm.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    pieces = dict.fromkeys([*SPECIAL, *(processor.id_to_piece(n) for n in range(processor.vocab_size()))])
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    theirs = transformers.M2M100Tokenizer(str(folder / "vocab.json"), str(folder / "sentencepiece.bpe.model"))
    codes = sorted(theirs.lang_token_to_id, key=theirs.lang_token_to_id.get)
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": codes}))
    config = transformers.M2M100Config(vocab_size=len(pieces) + len(codes), max_position_embeddings=512, **SEQ2SEQ)
    transformers.M2M100ForConditionalGeneration(config).save_pretrained(folder)
    import_model(folder, tmp_path / "ours")
    ours = load(tmp_path / "ours", device="cpu")
    assert len(ours.extra["languages"]) == len(codes) == 100
    theirs.src_lang = "de"
    expected = theirs(LINES)["input_ids"]
    assert [request.source for request in requests(ours, LINES, {"src_lang": "de", "tgt_lang": "en"})] == expected
