"""The packaged translators, exported to Hugging Face, give the same greedy translations in transformers."""

from pathlib import Path

import pytest
import torch
import transformers

import clearhead
from clearhead.checkpoint.formats import import_model

TEXTS = {
    "en-de": ["Two dogs are playing in the snow.", "I don't know where she lives.", "Tom bought a new car yesterday."],
    "de-en": ["Wo wohnst du?", "Zwei Hunde spielen im Schnee.", "Ich habe gestern ein Buch gelesen."],
    "zh-en": ["他昨天去了学校。", "我不知道她住在哪里。", "你想喝茶吗？"],
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_packaged_translator_exports_to_transformers(name: str, tmp_path: Path) -> None:
    model = clearhead.load(name, device="cpu")
    model.export(tmp_path / "hf", to="hf")
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS[name]:
        with torch.no_grad():
            ids = theirs.generate(**tokenizer(text, return_tensors="pt"), num_beams=1, max_new_tokens=40)
        assert tokenizer.decode(ids[0], skip_special_tokens=True) == model.translate(text, beam=1).text
    import_model(tmp_path / "hf", tmp_path / "again")
    again = clearhead.load(tmp_path / "again", device="cpu")
    assert [r.text for r in again.translate(TEXTS[name], beam=4)] == [
        r.text for r in model.translate(TEXTS[name], beam=4)
    ]
