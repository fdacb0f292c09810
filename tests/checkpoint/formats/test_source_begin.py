"""Tokens before the source of an imported encoder-decoder: those that the tokenizer of transformers adds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import clearhead
from clearhead.checkpoint.formats import import_model
from clearhead.predict.align import source_words

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = [f"word{number}" for number in range(40)]
IDS = [("<s>", 0), ("</s>", 2)]
TEXT = "word3 word17 word5"
ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
TEMPLATE = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=IDS)
NO_BEGIN = processors.TemplateProcessing(single="$A </s>", special_tokens=IDS)


def saved(
    folder: Path, processor: Any, model_type: str = "Bart", codes: tuple[str, ...] = (), class_name: str = ""
) -> Any:
    """Save a small translator with random weights and a tokenizer of words; return it."""
    tokens = [*SPECIAL, *WORDS, *codes]
    engine = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.add_special_tokens([*SPECIAL, *codes])
    if processor is not None:
        engine.post_processor = processor
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, **names).save_pretrained(folder)
    if class_name:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": class_name}))
    settings = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2}
    settings |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 1}
    settings |= {"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = getattr(transformers, f"{model_type}Config")(
        vocab_size=len(tokens), max_position_embeddings=64, attn_implementation="eager", **settings
    )
    torch.manual_seed(5)
    name = "MarianMTModel" if model_type == "Marian" else f"{model_type}ForConditionalGeneration"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    return model


def imported(folder: Path) -> Any:
    import_model(folder / "theirs", folder / "ours")
    return clearhead.load(folder / "ours", device="cpu")


@pytest.mark.parametrize(
    ("processor", "begin"),
    [
        (ROBERTA, [0]),
        (TEMPLATE, [0]),
        (processors.Sequence([processors.ByteLevel(trim_offsets=True), TEMPLATE]), [0]),
        (NO_BEGIN, []),
    ],
)
@pytest.mark.parametrize("model_type", ["Bart", "MBart", "Marian"])
def test_a_source_has_the_ids_of_transformers(
    processor: Any, begin: list[int], model_type: str, tmp_path: Path
) -> None:
    saved(tmp_path / "theirs", processor, model_type)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")(TEXT).input_ids
    model = imported(tmp_path)
    assert list(model.inspect(TEXT).source.ids) == expected == [*begin, 7, 21, 9, 2]
    assert model.extra.get("source_begin", []) == begin


def test_a_bart_tokenizer_without_post_processor_has_one_by_its_class(tmp_path: Path) -> None:
    """transformers' BartTokenizer adds it."""
    saved(tmp_path / "theirs", None, class_name="BartTokenizer")
    assert imported(tmp_path).extra["source_begin"] == [0]


def test_a_language_code_of_the_post_processor_is_not_repeated(tmp_path: Path) -> None:
    codes = ("eng_Latn", "deu_Latn")
    first = len(SPECIAL) + len(WORDS)
    special = [*IDS, ("eng_Latn", first)]
    processor = processors.TemplateProcessing(single="eng_Latn $A </s>", special_tokens=special)
    saved(tmp_path / "theirs", processor, "M2M100", codes)
    model = imported(tmp_path)
    model.extra.update(src_lang="deu_Latn", tgt_lang="eng_Latn")
    assert list(model.inspect(TEXT).source.ids) == [first + 1, 7, 21, 9, 2]


@pytest.mark.parametrize("processor", [ROBERTA, TEMPLATE])
def test_a_translation_of_bart_is_that_of_transformers(processor: Any, tmp_path: Path) -> None:
    theirs = saved(tmp_path / "theirs", processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    inputs = torch.tensor([tokenizer(TEXT).input_ids])
    options: dict[str, Any] = {"num_beams": 4, "do_sample": False, "max_new_tokens": 20, "bad_words_ids": [[1]]}
    expected = theirs.generate(inputs, **options, return_dict_in_generate=True, output_scores=True)
    model = imported(tmp_path)
    result = model.translate(TEXT, beam=4, max_new_tokens=20)
    assert result.text == tokenizer.decode(expected.sequences[0], skip_special_tokens=True)
    assert result.score == pytest.approx(expected.sequences_scores[0].item(), abs=1e-4)
    without = theirs.generate(inputs[:, 1:], **options)
    assert without.tolist() != expected.sequences.tolist(), "the begin token makes a difference"


@pytest.mark.parametrize(("processor", "codes"), [(ROBERTA, ()), (NO_BEGIN, ("eng_Latn", "deu_Latn"))])
def test_words_are_aligned_without_what_precedes_them(processor: Any, codes: tuple[str, ...], tmp_path: Path) -> None:
    """A begin token or a language code shifts the columns of attention by one."""
    saved(tmp_path / "theirs", processor, codes=codes)
    model = imported(tmp_path)
    if codes:
        model.extra.update(src_lang=codes[0], tgt_lang=codes[1])
    assert len(model.inspect(TEXT, target="word1").source.ids) == 1 + 3 + 1
    words = source_words(model, TEXT)
    assert words.texts == tuple(TEXT.split())
    assert words.matrix(5).tolist() == [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0]]


def test_exports_keep_the_begin_token(tmp_path: Path) -> None:
    saved(tmp_path / "theirs", ROBERTA, "Marian")
    model = imported(tmp_path)
    model.export(tmp_path / "back", to="hf")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert again(TEXT).input_ids == [0, 7, 21, 9, 2]
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    model.export(tmp_path / "ct2", to="ctranslate2")
    translator = ctranslate2.Translator(str(tmp_path / "ct2"), intra_threads=1)
    [result] = translator.translate_batch([TEXT.split()], beam_size=1, max_decoding_length=10)
    ours = model.translate(TEXT, beam=1, max_new_tokens=10)
    assert result.hypotheses[0] == [model.tokenizer.id_to_token(number) for number in ours.ids]
