"""/inspect routes of attention: every number equals the reference, bad input is an error in words."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from torch.nn import functional as F

import clearhead.serve
from clearhead.interpret import capture_attention, own_copy
from clearhead.predict import Model
from clearhead.serve.inspect import mount_inspect
from clearhead.serve.inspect.attention import THUMBNAIL
from clearhead.serve.inspect.frame import frame, unframe
from tests.explore.models import TEXT, ask, client, small

FAMILIES = {
    "translator": ("encoder", "decoder", "cross"),
    "llama": ("decoder",),
    "gpt": ("decoder",),
    "bert": ("encoder",),
}
MODULES = {"encoder": "encoder.layers.{}.attention", "decoder": "decoder.layers.{}.attention",
           "cross": "decoder.layers.{}.cross_attention"}  # fmt: skip


def test_a_frame_returns_what_was_packed() -> None:
    tensors = {"a": torch.rand(3, 5), "b": torch.arange(7), "c": torch.tensor([[True, False]]), "d": torch.zeros(0, 2)}
    header, found = unframe(frame({"text": "猫", "bad": math.nan, "list": [1.5, math.inf]}, {**tensors, "none": None}))
    assert header == {"text": "猫", "bad": None, "list": [1.5, None]}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=0, atol=0)


def test_the_models_are_listed_with_their_views() -> None:
    found = {each["name"]: each for each in client().get("/inspect/models").json()["models"]}
    assert found["translator"]["views"] == [
        "tokens", "attention", "steps", "next", "translate", "switches", "compare"]  # fmt: skip
    assert "understand" in found["bert"]["views"]
    assert "next" not in found["bert"]["views"]
    assert found["classes"]["labels"][0] == "O"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_equals_the_reference(name: str) -> None:
    model = small(name)
    header, overviews = ask("trace", model=name, text=TEXT)
    assert tuple(header["kinds"]) == FAMILIES[name]
    with capture_attention(model.network) as traces, torch.no_grad():
        ids = [torch.tensor([header[side]["ids"]]) for side in ("source", "target") if header[side]]
        logits = model.network(*ids)[0]
    if header["labels"]:
        labels = torch.tensor(header["labels"])
        assert header["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-5)
    for kind, layers in header["kinds"].items():
        layer, head = layers - 1, 3
        trace = traces[MODULES[kind].format(layer)]
        group = head // (len(trace.q[0]) // len(trace.k[0]))
        where = {"model": name, "text": TEXT, "kind": kind, "layer": layer, "head": head}
        steps_header, steps = ask("steps", **where)
        expected = {"q": trace.q[0, head], "k": trace.k[0, group], "v": trace.v[0, group],
                    "weights": trace.weights[0, head], "update": trace.updates[0, head],
                    "sublayer": trace.output[0]}  # fmt: skip
        for step, value in expected.items():
            torch.testing.assert_close(steps[step], value.detach(), msg=f"{name} {kind} {step}")
        head_header, one = ask("head", **where)
        torch.testing.assert_close(one["weights"], steps["weights"])
        assert head_header["effect"]["divergence"] > 0
        size = -(-max(steps["weights"].shape) // THUMBNAIL)
        exact = F.max_pool2d(steps["weights"][None], size, ceil_mode=True)[0]
        assert (overviews[kind][layer, head] / 255 - exact).abs().max() <= 0.5 / 255 + 1e-6
        assert steps_header["rotary"] == (name == "llama")
        patterns, weights = overviews[f"{kind}_patterns"][layer, head], steps["weights"]
        square = kind != "cross"
        previous = float(weights.diagonal(-1).mean()) if square else 0.0
        expected_patterns = [previous, float(weights[:, 0].mean()), float(weights.amax(-1).mean())]
        assert patterns.tolist() == pytest.approx(expected_patterns, abs=1e-6)
        effects, _ = ask("effects", model=name, text=TEXT, group="heads", kind=kind, layer=layer)
        assert sorted(each["head"] for each in effects["effects"]) == list(range(4))
        own = next(each for each in effects["effects"] if each["head"] == head)
        assert own["divergence"] == pytest.approx(head_header["effect"]["divergence"])
        rotated = ("rope_q", "rope_k") if name == "llama" else ()
        cells = ("q", "k", "v", *rotated, "scores", "scaled", "weights", "output", "update", "sum")
        for step in cells:
            cell, vectors = ask("cell", **where, step=step, row=2, column=1)
            total = float(vectors["a"] @ vectors["b"]) + (cell["bias"] or 0)
            assert total == pytest.approx(cell["value"], rel=1e-4, abs=1e-5), (kind, step)
        table = {"scores": steps["scores"], "weights": steps["weights"], "sum": steps["sublayer"]}
        for step, values in table.items():
            cell, _ = ask("cell", **where, step=step, row=2, column=1)
            assert cell["value"] == pytest.approx(float(values[2, 1]))


def test_a_rotated_number_is_a_pair_turned_by_its_angle() -> None:
    where = {"model": "llama", "text": TEXT, "kind": "decoder", "layer": 1, "head": 3}
    _, steps = ask("steps", **where)
    for step, table in (("rope_q", steps["q"]), ("rope_k", steps["k"])):
        for column in range(table.shape[1]):  # both halves of the pairs
            _, vectors = ask("cell", **where, step=step, row=5, column=column)
            assert float(vectors["a"] @ vectors["b"]) == pytest.approx(float(table[5, column]), abs=1e-5)
            assert float(vectors["b"].square().sum()) == pytest.approx(1)
    body = {"model": "gpt", "text": TEXT, "kind": "decoder", "layer": 0, "head": 0, "step": "rope_q", "row": 0}
    answer = client().post("/inspect/cell", json={**body, "column": 0})
    assert (answer.status_code, "no rotary positions" in answer.text) == (400, True)


def test_the_residual_stream_is_given_as_lengths() -> None:
    _, norms = ask("layer", model="llama", text=TEXT, kind="decoder", layer=1)
    _, steps = ask("steps", model="llama", text=TEXT, kind="decoder", layer=1, head=0)
    torch.testing.assert_close(norms["x"][1], steps["residual"].norm(dim=-1))
    torch.testing.assert_close(norms["attention"][1], steps["sublayer"].norm(dim=-1))
    assert (norms["hidden"].shape[1], (norms["hidden"] != 0).any()) == (32, True)


def test_tokens_are_joined_to_their_characters() -> None:
    header, _ = ask("trace", model="gpt", text="猫 é 🙂 sees")
    side = header["target"]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(side["pieces"])
    covered = {index for span in side["spans"] if span for index in range(span[1], span[2])}
    assert covered >= {index for index, letter in enumerate("猫 é 🙂 sees") if letter != " "}
    smile = [part for part, piece in zip(side["parts"], side["pieces"], strict=True) if "🙂" in piece]
    assert [number for number, _ in smile] == list(range(1, len(smile) + 1))
    assert len(smile) > 1


def test_masks_and_pairs_of_an_encoder_are_found_in_the_text() -> None:
    header, _ = ask("trace", model="bert", text="a [MASK] sees the dog")
    side = header["source"]
    position = side["ids"].index(small("bert").tokenizer.id("mask"))
    assert side["spans"][position] == [0, 2, 8]
    pair, _ = ask("trace", model="bert", text="a man", target="the dog")
    assert {span[0] for span in pair["source"]["spans"] if span} == {0, 1}


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("trace", {"model": "gpt", "text": ""}, 400, "text: it is empty"),
        ("trace", {"model": "gpt", "text": "   "}, 400, "empty"),
        ("trace", {"model": "gpt", "text": "dog " * 50_000}, 400, "tokens, but this page shows 1 to 128"),
        ("trace", {"model": "translator", "text": "dog " * 50_000}, 400, "tokens, but this page shows"),
        ("trace", {"model": "bert", "text": "dog " * 50_000}, 400, "tokens, but"),
        ("trace", {"model": "gpt", "text": "x" * 10_000_000}, 413, "8,388,608 bytes"),
        ("trace", {"model": "nobody", "text": "a"}, 400, "'nobody' is not served here"),
        ("trace", {"model": "gpt", "text": "a", "target": "b"}, 400, "target: a decoder reads one text"),
        ("trace", {"model": "gpt", "text": "a", "extra": 1}, 400, "extra"),
        ("trace", {"model": "gpt"}, 400, "text: missing"),
        ("head", {"model": "gpt", "text": "a", "kind": "cross", "layer": 0, "head": 0}, 400, "no such part"),
        ("head", {"model": "gpt", "text": "a", "kind": "decoder", "layer": 99, "head": 0}, 400, "layer 99"),
        ("head", {"model": "gpt", "text": "a", "kind": "decoder", "layer": -1, "head": 0}, 400, "layer"),
        ("cell", {"model": "gpt", "text": "a", "kind": "decoder", "step": "q", "row": 99, "column": 0}, 400, "cell 99"),
    ],
)  # fmt: skip
def test_bad_input_is_an_error_in_words(route: str, body: dict, status: int, words: str) -> None:
    answer = client().post(f"/inspect/{route}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


def test_the_code_behind_a_step_is_ours() -> None:
    answer = client().get("/inspect/code/attention").json()
    assert answer["file"] == "clearhead/ops/attention/reference.py"
    assert any("math.sqrt" in line for line in answer["lines"])
    assert client().get("/inspect/code/os").status_code == 400


def test_the_page_marks_a_line_of_the_code_of_every_step() -> None:
    script = (Path(clearhead.serve.__file__).parent / "page/side.js").read_text("utf-8")
    steps = re.findall(r'^  (\w+): \["(.+)", "(\w+)", "(.+)"\],$', script, re.M)
    assert len(steps) > 20
    messages = json.loads((Path(clearhead.serve.__file__).parent / "page/messages/en.json").read_text("utf-8"))
    for step, formula, code, mark in steps:
        lines = client().get(f"/inspect/code/{code}").json()["lines"]
        assert any(mark in line for line in lines), (step, mark)
        assert {f"step.{step}", f"step.{step}.note"} <= messages.keys()
        assert formula


def test_a_model_without_tokenizer_or_with_nan_is_an_error_in_words() -> None:
    broken = Model(own_copy(small("gpt").network), small("gpt").own_tokenizers, {}, "broken")
    layer = broken.network.decoder.layers[0].feed_forward.up
    layer.weight = torch.nn.Parameter(torch.full_like(layer.weight, math.nan))
    app = FastAPI()
    mount_inspect(app, {"bare": Model(small("gpt").network, (), {}, "bare"), "broken": broken})
    with TestClient(app) as here:
        found = here.get("/inspect/models").json()["models"]
        assert found[0]["views"] == []
        for name, words in (("bare", "tokenizer.json"), ("broken", "NaN")):
            answer = here.post("/inspect/trace", json={"model": name, "text": "a man"})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]
