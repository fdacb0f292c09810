"""/inspect routes of the other views: each number equals a recomputation on the reference network."""

import math

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch.nn import functional as F

from clearhead.config import preset
from clearhead.inference.alignment import alignment_weights
from clearhead.interpret.trace import own_copy
from clearhead.model import build
from clearhead.predict import Model, load
from clearhead.predict.align import alignment_heads
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.frame import unframe
from clearhead.serve.inspect.texts import spelled
from clearhead.serve.inspect.tokens import project
from clearhead.text import ROLES, train
from tests.explore.models import ask, client, small

TEXT = "a man sees the dog"


def test_logits_of_the_next_token_and_the_lens() -> None:
    model = small("llama")
    header, tensors = ask("next", model="llama", text=TEXT)
    logits = model.logits(torch.tensor([model.prompt_ids(TEXT)]))[0, -1]
    torch.testing.assert_close(tensors["logits"], logits)
    assert header["ids"][0] == int(logits.argmax())
    last = header["lens"][-1]
    assert last["logprobs"][0] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
    assert len(header["lens"]) == model.config.decoder_layers


def test_chosen_tokens_are_appended_as_ids() -> None:
    model = small("gpt")
    first, _ = ask("next", model="gpt", text=TEXT)
    chosen = first["ids"][:2]
    _, tensors = ask("next", model="gpt", text=TEXT, appended=chosen)
    logits = model.logits(torch.tensor([[*model.prompt_ids(TEXT), *chosen]]))[0, -1]
    torch.testing.assert_close(tensors["logits"], logits)
    trace, _ = ask("trace", model="gpt", text=TEXT, appended=chosen)
    assert trace["target"]["ids"][-2:] == chosen


def test_the_cache_is_smaller_by_the_grouping_of_heads() -> None:
    header, _ = ask("next", model="llama", text=TEXT, position=3)
    cache, config = header["cache"], small("llama").config
    assert cache["bytes"] == 2 * config.decoder_layers * config.kv_heads * config.head_dim * 4 * 4
    assert cache["multi_head_bytes"] == cache["bytes"] * config.heads // config.kv_heads
    assert cache["uncached_flops"] > 3 * cache["step_flops"]


@pytest.mark.parametrize("beam", [1, 3, 5])
def test_the_beam_tree_finds_what_beam_search_finds(beam: int) -> None:
    model = small("translator")
    for text in (TEXT, "two dogs see a café", "猫坐在垫子上。"):
        header, _ = ask("beam", model="translator", text=text, beam=beam, steps=12)
        expected = model.translate(text, beam=beam, n_best=beam, max_new_tokens=12, logprobs=True)
        for found, wanted in zip(header["hypotheses"], expected.candidates, strict=True):
            assert tuple(found["ids"]) == wanted.ids
            assert found["score"] == pytest.approx(wanted.score, abs=1e-4)


def test_the_beam_tree_of_a_packaged_translator() -> None:
    model = load("en-de", "cpu")
    app = FastAPI()
    mount_inspect(app, {"en-de": model})
    with TestClient(app) as here:
        text = "Two dogs are playing in the snow."
        header, _ = unframe(here.post("/inspect/beam", json={"text": text, "beam": 4}).content)
        assert header["hypotheses"][0]["text"] == model.translate(text, beam=4).text
        best = [node["token"] for node in header["nodes"] if node["best"]]
        second = next(node for node in header["nodes"] if node["step"] == 2 and not node["best"])
        forced = [best[0], second["token"]]
        header, _ = unframe(here.post("/inspect/beam", json={"text": text, "beam": 4, "prefix": forced}).content)
        assert all(each["ids"][:2] == forced for each in header["hypotheses"])


def test_scores_of_the_tree_add_up() -> None:
    header, _ = ask("beam", model="translator", text=TEXT, beam=3, steps=6)
    nodes = header["nodes"]
    for node in nodes:
        before = nodes[node["parent"]] if node["parent"] >= 0 else {"score": 0.0, "state": "kept"}
        assert node["score"] == pytest.approx(before["score"] + node["logprob"], abs=1e-4)
        assert before["state"] == "kept"
    for step in {node["step"] for node in nodes}:
        assert sum(node["state"] == "kept" for node in nodes if node["step"] == step) <= 3


def test_alignment_weights_are_those_of_translate() -> None:
    model = small("translator")
    trace, _ = ask("trace", model="translator", text=TEXT, target="the dog sees")
    header, tensors = ask("align", model="translator", text=TEXT, target="the dog sees")
    source, target = trace["source"]["ids"], trace["target"]["ids"]
    expected = alignment_weights(model.network, source, target[:1], target[1:], alignment_heads(model))
    torch.testing.assert_close(tensors["weights"], expected)
    assert tensors["words"].shape == (len(header["target_words"]), len(header["source_words"]))


def test_teacher_forced_and_free_running_histories() -> None:
    model = small("translator")
    body = {"model": "translator", "text": TEXT, "target": "the dog sees the man"}
    trace, _ = ask("trace", **body)
    header, tensors = ask("forced", **body)
    source, target = torch.tensor([trace["source"]["ids"]]), torch.tensor([trace["target"]["ids"]])
    labels = torch.tensor(header["labels"])
    logprobs = model.logits(source, target)[0].log_softmax(-1)
    torch.testing.assert_close(tensors["forced"], logprobs[range(len(labels)), labels])
    own = [int(target[0, 0])]
    for _ in labels:
        own.append(int(model.logits(source, torch.tensor([own]))[0, -1].argmax()))
    assert header["own"] == own[1:]
    free = model.logits(source, torch.tensor([own[:-1]]))[0].log_softmax(-1)
    torch.testing.assert_close(tensors["free"], free[range(len(labels)), labels])
    assert header["free_loss"] == pytest.approx(-float(tensors["free"].mean()), abs=1e-4)
    parting = header["parting"]
    assert own[1 : parting + 1] == labels[:parting].tolist()
    assert own[parting + 1] != labels[parting]


@pytest.mark.parametrize("name", ["translator", "llama", "bert", "classes", "tags", "span"])
def test_switching_heads_off_equals_weights_of_zero(name: str) -> None:
    from tests.explore.models import client as explored

    model = explored().app.state.explorer.get(name).model
    stack = "decoder" if name in ("translator", "llama") else "encoder"
    off = [{"part": "head", "stack": stack, "layer": 1, "head": 1}]
    target = "the dog" if name == "translator" else None
    header, tensors = ask("switch", model=name, text=TEXT, target=target, off=off)
    trace, _ = ask("trace", model=name, text=TEXT, target=target)
    assert header["loss"] == trace["loss"]
    if name in ("translator", "llama"):
        network = own_copy(model.network).requires_grad_(False)
        layer = network.decoder.layers[1].attention.output
        layer.weight = torch.nn.Parameter(layer.weight.clone())
        size = model.config.head_dim
        with torch.no_grad():
            layer.weight[:, size : 2 * size] = 0
        ids = [torch.tensor([trace[side]["ids"]]) for side in ("source", "target") if trace[side]]
        labels = torch.tensor(trace["labels"])
        with torch.no_grad():
            logits = network(*ids)[0]
        assert header["effect"]["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
        shown = logits.softmax(-1)[range(len(labels)), labels.clamp(min=0)] * (labels >= 0)
        torch.testing.assert_close(tensors["after"], shown)
    nothing, _ = ask("switch", model=name, text=TEXT, target=target)
    assert nothing["effect"]["divergence"] == 0
    assert nothing["written"] == nothing["written_off"]


def test_effects_are_ranked_and_complete() -> None:
    for group, count in (("heads", 8), ("parts", 8)):
        header, _ = ask("effects", model="llama", text=TEXT, group=group)
        values = [each["divergence"] for each in header["effects"]]
        assert values == sorted(values, reverse=True)
        assert len(values) == header["of"] == count
    off = [{key: header["effects"][0][key] for key in ("part", "stack", "layer", "head")}]
    switch, _ = ask("switch", model="llama", text=TEXT, off=off)
    assert switch["effect"]["divergence"] == pytest.approx(values[0])


def test_masks_are_filled_as_fill_does() -> None:
    model = small("bert")
    header, tensors = ask("understand", model="bert", text="a [MASK] sees the [MASK]")
    expected = model.fill("a [MASK] sees the [MASK]", top=3).masks
    assert len(header["predictions"]) == len(expected) == 2
    ids = header["predictions"][0]["ids"]
    assert header["predictions"][0]["probs"] == sorted(header["predictions"][0]["probs"], reverse=True)
    assert any(token.score == pytest.approx(p, abs=1e-5) for token in expected[0].tokens
               for p in header["predictions"][0]["probs"])  # fmt: skip
    assert tensors["cls"].shape[0] == model.config.encoder_layers
    trace, _ = ask("trace", model="bert", text="a [MASK] sees the [MASK]")
    source = torch.tensor([trace["source"]["ids"]])
    row, hidden = header["predictions"][0]["row"], 1
    changed = source.clone()
    changed[0, hidden] = model.tokenizer.id("mask")
    before, after = (model.logits(each)[0, row].log_softmax(-1)[ids[0]] for each in (source, changed))
    assert float(tensors["drops"][0, hidden]) == pytest.approx(float(before - after), abs=1e-4)


@pytest.mark.parametrize(("name", "task"), [("classes", "classify"), ("tags", "tag"), ("span", "answer")])
def test_heads_of_other_tasks(name: str, task: str) -> None:
    header, _ = ask("understand", model=name, text="a man", target="sees the dog" if name == "span" else None)
    assert header["task"] == task
    assert header["predictions"]
    assert all(sum(each["probs"]) <= 1.0001 for each in header["predictions"])


def test_neighbors_bytes_and_positions() -> None:
    model = small("gpt")
    header, _ = ask("neighbors", model="gpt", text=TEXT, position=2, count=3)
    matrix = model.network.decoder.embedding.tokens.weight.detach()
    cosines = F.cosine_similarity(matrix, matrix[header["token"]][None])
    assert header["similarities"][0] == pytest.approx(float(cosines[header["ids"][0]]), abs=1e-5)
    spelled, _ = ask("tokens", model="gpt", text="猫 é")
    data = b"".join(bytes(each) for each in spelled["target"]["bytes"] if each)
    assert "猫 é".encode() in data
    for name, columns in (("gpt", 16), ("llama", 2), ("translator", 16)):
        kind = "decoder"
        _, tensors = ask("positions", model=name, text=TEXT, kind=kind)
        assert tensors["table"].shape == (128, columns)


def test_position_encodings_are_what_the_embedding_adds() -> None:
    """With the offset of RoBERTa and BART, too."""
    changes = ("dim=16", "heads=4", "vocab_size=23", "max_positions=32", "position_offset=2")
    for position in ("learned", "sinusoidal"):
        network = build(preset("tiny-gpt", (*changes, f"position={position}"))).eval()
        app = FastAPI()
        mount_inspect(app, {"offset": Model(network, small("gpt").own_tokenizers, {}, "offset")})
        embedding = network.decoder.embedding
        with torch.no_grad():
            embedding.tokens.weight[:] = 0
            expected = embedding(torch.zeros(1, 32, dtype=torch.long), torch.arange(32)[None])[0]
            embedding.tokens.weight[:] = torch.randn_like(embedding.tokens.weight)
        with TestClient(app) as here:
            body = {"text": "!", "kind": "decoder"}
            _, tensors = unframe(here.post("/inspect/positions", json=body).content)
        torch.testing.assert_close(tensors["table"], expected)


def test_a_word_in_several_contexts() -> None:
    texts = ["the dog sees", "a man sees the dog", "no such word"]
    header, tensors = ask("context", model="gpt", text=texts[0], others=texts[1:], word="dog")
    assert [each["text"] for each in header["found"]] == [0, 1]
    assert tensors["cosines"][0, 1] < 1
    assert tensors["points"].shape == tensors["static_points"].shape == (2, 2)
    torch.testing.assert_close(tensors["static_points"], torch.zeros(2, 2))  # the same token in both
    answer = client().post("/inspect/context", json={"model": "gpt", "text": "a", "others": [], "word": "zebra"})
    assert "is in none of the texts" in answer.json()["error"]["message"]


def test_a_token_that_starts_a_word_has_its_space() -> None:
    tokenizer = train(["two dogs see two dogs"] * 9, "bpe", 60, roles=ROLES)
    start, inside = (next(n for n in range(len(tokenizer)) if tokenizer.id_to_token(n) == name) for name in ("▁", "o"))
    assert (spelled(tokenizer, start), spelled(tokenizer, inside)) == (" ", "o")
    word = tokenizer.encode("two dogs").pop()
    assert tokenizer.id_to_token(word).startswith("▁")
    assert spelled(tokenizer, word) == " " + tokenizer.decode([word])


def test_the_projection_keeps_distances_of_points_in_a_plane() -> None:
    plane = torch.randn(5, 2) @ torch.linalg.qr(torch.randn(7, 2))[0].T
    torch.testing.assert_close(
        torch.cdist(project(plane), project(plane)), torch.cdist(plane, plane), rtol=1e-3, atol=1e-4
    )
    assert project(torch.ones(1, 7)).tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        ("next", {"model": "bert", "text": "a"}, "does not predict a next token"),
        ("next", {"model": "gpt", "text": "a", "position": 99}, "position: 99"),
        ("next", {"model": "gpt", "text": "a", "appended": [9999]}, "outside the vocabulary"),
        ("beam", {"model": "gpt", "text": "a"}, "translat"),
        ("beam", {"model": "translator", "text": "a", "beam": 99}, "beam"),
        ("beam", {"model": "translator", "text": "a", "length_penalty": math.inf}, ""),
        ("align", {"model": "gpt", "text": "a"}, "no translator"),
        ("understand", {"model": "gpt", "text": "a"}, "no encoder"),
        ("switch", {"model": "gpt", "text": "a", "off": [{"part": "cross", "stack": "cross"}]}, "no such part"),
        ("neighbors", {"model": "gpt", "text": "a", "position": 5000}, "no token 5000"),
    ],
)  # fmt: skip
def test_what_a_model_does_not_have_is_an_error_in_words(route: str, body: dict, words: str) -> None:
    if body.get("length_penalty") == math.inf:
        answer = client().post(f"/inspect/{route}", content='{"text": "a", "length_penalty": 1e999}')
    else:
        answer = client().post(f"/inspect/{route}", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
