"""Inspections: per-head updates, Q/K/V and the logit lens of the reference network, in every family."""

import json
from importlib import import_module

import pytest
import torch

import clearhead
from clearhead.interpret import Inspection
from clearhead.model import EncoderDecoder
from clearhead.predict import Model
from tests.predict.task_models import task_model

TEXTS = {
    "en-de": "Two dogs are playing in the snow.",
    "novels-gpt": "It was a dark evening in October",
    "novels-bert": "She looked out of the [MASK] at the garden.",
}


@pytest.fixture(scope="module", params=TEXTS)
def inspected(request: pytest.FixtureRequest) -> tuple[Model, Inspection]:
    model = clearhead.load(request.param, "cpu")
    return model, model.inspect(TEXTS[request.param])


def test_updates_and_bias_sum_to_the_attention_output(inspected: tuple[Model, Inspection]) -> None:
    model, inspection = inspected
    config = model.config
    assert len(inspection.encoder) == config.encoder_layers
    assert len(inspection.decoder) == config.decoder_layers
    assert len(inspection.cross) == (config.decoder_layers if isinstance(model.network, EncoderDecoder) else 0)
    for trace in (*inspection.encoder, *inspection.decoder, *inspection.cross):
        total = trace.updates.sum(0) + (0 if trace.bias is None else trace.bias)
        torch.testing.assert_close(total, trace.output, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(trace.weights.sum(-1), torch.ones(trace.weights.shape[:2]))


def test_traces_have_the_documented_shapes(inspected: tuple[Model, Inspection]) -> None:
    model, inspection = inspected
    sizes = {name: len(side) for name in ("source", "target") if (side := getattr(inspection, name)) is not None}
    heads, groups, head_dim, dim = (getattr(model.config, name) for name in ("heads", "kv_heads", "head_dim", "dim"))
    sides = {"encoder": ("source", "source"), "decoder": ("target", "target"), "cross": ("target", "source")}
    for name, (queries, keys) in sides.items():
        for trace in getattr(inspection, name):
            t, s = sizes[queries], sizes[keys]
            assert trace.weights.shape == (heads, t, s)
            assert trace.q.shape == (heads, t, head_dim)
            assert trace.k.shape == trace.v.shape == (groups, s, head_dim)
            assert trace.updates.shape == (heads, t, dim)


def test_attention_weights_are_the_softmax_of_queries_and_keys(inspected: tuple[Model, Inspection]) -> None:
    _, inspection = inspected
    for trace in (*inspection.encoder[-1:], *inspection.cross[-1:]):
        keys = trace.k.repeat_interleave(len(trace.q) // len(trace.k), 0)
        scores = trace.q @ keys.transpose(-2, -1) / trace.q.shape[-1] ** 0.5
        torch.testing.assert_close(scores.softmax(-1), trace.weights, rtol=1e-4, atol=1e-5)


def test_the_lens_of_the_last_layer_is_the_output_of_the_model(inspected: tuple[Model, Inspection]) -> None:
    model, inspection = inspected
    sides = [torch.tensor([side.ids]) for side in (inspection.source, inspection.target) if side is not None]
    logits = model.logits(*sides)[0]
    assert inspection.lens is not None
    logprobs, ids = logits.log_softmax(-1).topk(5)
    torch.testing.assert_close(inspection.lens.logprobs[-1], logprobs, rtol=1e-4, atol=1e-4)
    assert torch.equal(inspection.lens.ids[-1], ids)
    assert inspection.lens.ids.shape == (model.config.decoder_layers or model.config.encoder_layers, len(logits), 5)
    assert len(inspection.lens.texts[-1][0]) == 5


def test_an_inspection_is_json_ready_and_short_in_a_shell(inspected: tuple[Model, Inspection]) -> None:
    _, inspection = inspected
    data = json.loads(json.dumps(inspection.to_dict(("weights",)), allow_nan=False))
    traces = data["encoder"] + data["decoder"] + data["cross"]
    assert all(set(trace) == {"weights"} for trace in traces)
    first = (inspection.encoder or inspection.decoder)[0]
    assert data["encoder" if inspection.encoder else "decoder"][0]["weights"] == first.weights.tolist()
    assert set((inspection.to_dict()["encoder"] or inspection.to_dict()["decoder"])[0]) >= {"q", "k", "v", "updates"}
    assert len(repr(inspection)) < 150
    assert "\n" not in repr(inspection)


def test_the_reference_network_is_inspected_whatever_the_inference_copy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fast = clearhead.load("en-de", "cpu"), clearhead.load("en-de", "cpu", "int8")
    fast.translate(TEXTS["en-de"])
    ours, theirs = (model.inspect(TEXTS["en-de"], "Zwei Hunde") for model in (plain, fast))
    assert torch.equal(ours.cross[-1].weights, theirs.cross[-1].weights)
    assert ours.target is not None
    assert ours.target.texts[0] == "<begin>"
    loading = import_module("clearhead.predict.load")  # whose name in the package is that of its function
    monkeypatch.setattr(loading, "native_refuses", lambda *_: "without native steps")
    decoder = clearhead.load("novels-gpt", "cpu", "int8")  # then only quantized weights are kept
    with pytest.raises(clearhead.UserError, match="inspect: novels-gpt was loaded with quantized weights only"):
        decoder.inspect("It was")


def test_pairs_have_segments_and_a_model_without_lm_head_has_no_lens() -> None:
    model = task_model("classes", text_pairs=True)
    inspection = model.inspect("a cat", "The dog")
    assert inspection.lens is None
    assert inspection.to_dict()["lens"] is None
    assert inspection.source is not None
    assert inspection.source.texts.count("<separator>") == 2
    with pytest.raises(clearhead.UserError, match="top: 0 is too small"):
        model.inspect("a cat", top=0)
