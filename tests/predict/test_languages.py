"""Translators of several languages: codes before source and target, as in transformers; unknown codes are named."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

import clearhead
from clearhead.checkpoint.formats import import_model
from clearhead.cli import app
from clearhead.errors import UserError
from clearhead.predict.language_names import did_you_mean

CODES = {"nllb": ["eng_Latn", "deu_Latn", "zho_Hans"], "m2m100": ["__en__", "__de__", "__zh__"]}
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = [f"word{number}" for number in range(40)]


def multilingual(folder: Path, kind: str, **generation: Any) -> Any:
    """Save an M2M100 with a tokenizer of words and language codes."""
    tokens = [*SPECIAL, *WORDS, *CODES[kind]]
    engine = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens([AddedToken(token, special=True) for token in [*SPECIAL, *CODES[kind]]])
    config = transformers.M2M100Config(
        vocab_size=len(tokens), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = transformers.M2M100ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.generation_config.update(**generation)
    model.save_pretrained(folder)
    engine.save(str(folder / "tokenizer.json"))
    return model


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("beam", [1, 4])
def test_a_translation_is_that_of_transformers(kind: str, beam: int, tmp_path: Path) -> None:
    theirs = multilingual(tmp_path / "theirs", kind)
    import_model(tmp_path / "theirs", tmp_path / "ours")
    model = clearhead.load(tmp_path / "ours", device="cpu")
    vocabulary = model.tokenizer.vocabulary
    text = "word3 word17 word5"
    source, target = (CODES[kind][number] for number in (0, 2))
    ids = [vocabulary[source], *(vocabulary[word] for word in text.split()), vocabulary["</s>"]]
    expected = theirs.generate(
        torch.tensor([ids]), forced_bos_token_id=vocabulary[target], num_beams=beam, do_sample=False,
        max_new_tokens=20, bad_words_ids=[[vocabulary["<pad>"]]],
    )[0].tolist()  # fmt: skip
    assert expected[:2] == [vocabulary["</s>"], vocabulary[target]]
    result = model.translate(text, src_lang=source.strip("_"), tgt_lang=target.strip("_"), beam=beam, max_new_tokens=19)
    assert list(result.ids) == expected[2:]
    engine = model.engine()
    try:
        options: dict[str, Any] = {"src_lang": source.strip("_"), "tgt_lang": target.strip("_"), "max_new_tokens": 19}
        if beam == 1:
            assert list(engine.submit(text, **options).result().ids) == expected[2:]
    finally:
        engine.close()


def test_missing_and_unknown_languages_are_named(tmp_path: Path) -> None:
    multilingual(tmp_path / "theirs", "nllb")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    model = clearhead.load(tmp_path / "ours", device="cpu")
    with pytest.raises(UserError, match=r"src_lang: .*ours knows 3 languages; name one, like src_lang=eng_Latn"):
        model.translate("word1", tgt_lang="deu_Latn")
    with pytest.raises(UserError, match="tgt_lang: no language 'deu_latn'; did you mean deu_Latn"):
        model.translate("word1", src_lang="eng_Latn", tgt_lang="deu_latn")
    with pytest.raises(UserError, match="src_lang"):
        clearhead.load("en-de", device="cpu").translate("Hello", src_lang="eng_Latn")


def test_errors_of_the_command_name_its_options(tmp_path: Path) -> None:
    multilingual(tmp_path / "theirs", "nllb")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = str(tmp_path / "ours")
    for arguments, message in (
        ([ours, "word1", "--to", "deu_Latn"], "--from: .*ours knows 3 languages; name one, like --from eng_Latn$"),
        ([ours, "word1", "--from", "eng_Latn", "--to", "deu_latn"], "--to: no language 'deu_latn'; did you mean deu_L"),
        (["en-de", "Hello", "--from", "en"], "--from: en-de translates between two languages only; leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            app(["translate", *arguments, "--device", "cpu"], standalone_mode=False)


@pytest.mark.parametrize(
    ("module", "given", "meant"),
    [
        *(("nllb", given, "zho_Hans or zho_Hant") for given in ("zh", "zho", "zh-CN", "Chinese")),
        *(("nllb", given, "deu_Latn") for given in ("de", "deu", "de_DE", "german", "DEU_LATN", "deu_Ltn")),
        *(("m2m_100", given, "de") for given in ("DE", "deu", "deu_Latn", "German")),
        *(("mbart50", given, "de_DE") for given in ("de", "deu_Latn", "de_de")),
        *(("mbart50", given, "zh_CN") for given in ("zho_Hans", "zh", "chinese")),
    ],
)
def test_the_nearest_language_is_named_in_the_codes_of_the_model(module: str, given: str, meant: str) -> None:
    tokenization = importlib.import_module(f"transformers.models.{module}.tokenization_{module}")
    codes = tokenization.FAIRSEQ_LANGUAGE_CODES
    known = codes["m2m100"] if isinstance(codes, dict) else codes
    assert len(known) > 50
    assert did_you_mean(given, known) == f"; did you mean {meant}?"
    assert did_you_mean("klingon", known).startswith("; known: ")


def test_a_forced_first_token_is_the_default_language(tmp_path: Path) -> None:
    theirs = multilingual(tmp_path / "theirs", "m2m100", forced_bos_token_id=len(SPECIAL) + len(WORDS) + 1)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"src_lang": "en"}')
    import_model(tmp_path / "theirs", tmp_path / "ours")
    model = clearhead.load(tmp_path / "ours", device="cpu")
    assert (model.extra["src_lang"], model.extra["tgt_lang"]) == ("en", "de")
    text = "word2 word9"
    assert model.translate(text).ids == model.translate(text, src_lang="en", tgt_lang="de").ids
    model.export(tmp_path / "back", to="hf")
    back = transformers.M2M100ForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert back.generation_config.forced_bos_token_id == theirs.generation_config.forced_bos_token_id
