"""Pairs of texts for models whose table of segments has one row (RoBERTa, XLM-R): both texts are segment 0."""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from clearhead.checkpoint.formats import import_model
from clearhead.config.recipe import Recipe
from clearhead.evaluate.model import evaluate
from clearhead.predict import load
from clearhead.train.loop import train

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["the", "cat", "sat", "a", "dog", "ran", "away"]
TEXTS, SECONDS = ["the cat sat", "a dog"], ["a dog ran away", "the cat ran"]


@pytest.fixture(scope="module", params=["Roberta", "XLMRoberta"])
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face with a tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("theirs")
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *WORDS])}
    engine = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.add_special_tokens(SPECIAL)
    engine.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos_token": "<s>", "cls_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "sep_token": "</s>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=engine, unk_token="<unk>", **names).save_pretrained(folder)
    settings = {"vocab_size": len(vocabulary), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"intermediate_size": 32, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
    config = getattr(transformers, f"{request.param}Config")(**settings, id2label={0: "no", 1: "yes", 2: "maybe"})
    torch.manual_seed(0)
    model = getattr(transformers, f"{request.param}ForSequenceClassification")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def ours(theirs: Path, tmp_path: Path) -> Path:
    import_model(theirs, tmp_path / "ours")
    return tmp_path / "ours"


def test_a_pair_is_classified_as_transformers_does(theirs: Path, ours: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(theirs)
    network = transformers.AutoModelForSequenceClassification.from_pretrained(theirs).eval()
    results = load(ours, device="cpu").classify(TEXTS, SECONDS)
    for text, second, result in zip(TEXTS, SECONDS, results, strict=True):
        inputs = tokenizer(text, second, return_tensors="pt")
        inputs.pop("token_type_ids", None)  # all 0 by default
        with torch.no_grad():
            expected = network(**inputs).logits.softmax(-1)[0]
        found = torch.tensor([result.scores[name] for name in ("no", "yes", "maybe")])
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_a_pair_can_be_inspected(ours: Path) -> None:
    model = load(ours, device="cpu")
    assert len(model.inspect(TEXTS[0], target=SECONDS[0]).source.ids) == 3 + 4 + 4


def test_training_and_evaluation_on_pairs(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "pairs.csv"
    file.write_text("".join(f"{TEXTS[n % 2]},{SECONDS[n % 2]},{('no', 'yes', 'maybe')[n % 3]}\n" for n in range(40)))
    source = {"format": "csv", "files": [str(file)]}
    data = {"task": "classification", "train": source, "text_pairs": True, "held_out": 0.3, "max_length": 32}
    settings = {
        "model": {"init_from": str(ours)},
        "data": data | {"batch_tokens": 100, "workers": 0},
        "train": {"steps": 2, "warmup": 1, "validate_every": 2, "save_every": 2, "device": "cpu"},
    }
    assert train(Recipe.build(settings, where="test"), tmp_path / "run").step == 2
    assert evaluate(load(tmp_path / "run", device="cpu"))["texts"] > 0
