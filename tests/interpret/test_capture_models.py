"""Attention is captured in every method of a loaded model: generation, streams, chats and encoder tasks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from clearhead.errors import UserError
from clearhead.interpret import capture_attention
from clearhead.predict import Model, load
from tests.cli.models import make
from tests.predict.task_models import task_model

SELF, CROSS = "decoder.layers.1.attention", "decoder.layers.1.cross_attention"
TEXT = "a man sees the dog"


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("capture") / "translator", "tiny-translator"), "cpu")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(make(tmp_path_factory.mktemp("capture") / "gpt", "tiny-gpt"), "cpu")


def run_engine(model: Model, text: str) -> None:
    with model.engine() as engine:
        engine.submit(text, max_new_tokens=4).result()


GENERATION: dict[str, Callable[[Model], Any]] = {
    "generate": lambda model: model.generate(TEXT, max_new_tokens=4),
    "samples": lambda model: model.generate([TEXT, TEXT], samples=3, temperature=1.0, max_new_tokens=4),
    "stream": lambda model: list(model.stream(TEXT, max_new_tokens=4)),
    "chat": lambda model: model.chat(max_new_tokens=4).ask("hello"),
    "draft": lambda model: model.generate(TEXT, draft="prompt-lookup", max_new_tokens=4),
    "beam": lambda model: model.generate(TEXT, beam=3, max_new_tokens=4),
    "alternatives": lambda model: model.alternatives(TEXT, 3, max_new_tokens=4),
    "engine": lambda model: run_engine(model, TEXT),
}
TRANSLATION: dict[str, Callable[[Model], Any]] = {
    "greedy": lambda model: model.translate(TEXT, max_new_tokens=4, min_new_tokens=3),
    "beam": lambda model: model.translate([TEXT, "the dog"], beam=4, max_new_tokens=4),
    "align": lambda model: model.translate(TEXT, align=True, max_new_tokens=4),
    "alternatives": lambda model: model.alternatives(TEXT, 3, max_new_tokens=4),
    "engine": lambda model: run_engine(model, TEXT),
}


def check(trace: Any) -> None:
    """Weights are distributions, and the updates of all heads sum to the output of the layer."""
    torch.testing.assert_close(trace.weights.sum(-1), torch.ones(trace.weights.shape[:-1]))
    total = trace.updates.sum(1) + (0 if trace.bias is None else trace.bias)
    torch.testing.assert_close(total, trace.output, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", GENERATION)
def test_every_way_to_generate_is_captured_step_by_step(gpt: Model, name: str) -> None:
    with capture_attention(gpt.network) as traces:
        GENERATION[name](gpt)
    assert len(traces.passes[SELF]) >= 2, "the prompt, and at least one step"
    for trace in traces.passes[SELF]:
        check(trace)
        assert trace.k.shape == trace.v.shape == (*trace.k.shape[:2], trace.weights.shape[-1], trace.q.shape[-1])


@pytest.mark.parametrize("name", TRANSLATION)
def test_every_way_to_translate_is_captured(translator: Model, name: str) -> None:
    with capture_attention(translator) as traces:
        TRANSLATION[name](translator)
    assert {SELF, CROSS, "encoder.layers.0.attention"} <= set(traces)
    assert len(traces.passes[CROSS]) >= 2
    for trace in traces.passes[CROSS]:
        check(trace)


@pytest.mark.parametrize(
    ("output", "run"),
    [
        ("", lambda model: model.embed([TEXT, "the dog"])),
        ("", lambda model: model.similar(TEXT, ["the dog", "a cat"])),
        ("classes", lambda model: model.classify([TEXT, "the dog"])),
        ("tags", lambda model: model.tag(TEXT)),
        ("span", lambda model: model.answer("who?", TEXT)),
        ("lm", lambda model: model.fill("a [MASK] sees")),
    ],
)
def test_every_encoder_task_is_captured(output: str, run: Callable[[Model], Any]) -> None:
    model = task_model(output)
    with capture_attention(model.network) as traces:
        run(model)
    assert set(traces) == {"encoder.layers.0.attention", "encoder.layers.1.attention"}
    check(traces["encoder.layers.1.attention"])


def test_joined_steps_equal_one_pass_over_the_generated_text(gpt: Model) -> None:
    with capture_attention(gpt.network) as traces:
        [result] = gpt.generate([TEXT], max_new_tokens=6, min_new_tokens=6)
    joined, ids = traces.joined(SELF), [*gpt.prompt_ids(TEXT), *result.ids]
    with capture_attention(gpt.network) as full:
        gpt.logits(torch.tensor([ids[:-1]]))  # the last token is never an input
    for part in ("weights", "q", "k", "v", "updates", "output"):
        torch.testing.assert_close(getattr(joined, part), getattr(full[SELF], part), rtol=1e-4, atol=1e-4)


def test_joined_cross_attention_has_a_row_for_each_token(translator: Model) -> None:
    with capture_attention(translator.network) as traces:
        result = translator.translate(TEXT, beam=1, max_new_tokens=5, min_new_tokens=5)
    source = len(translator.tokenizer.encode(TEXT)) + 1
    assert traces.joined(CROSS).weights.shape == (1, 2, len(result.ids), source)
    check(traces.joined(CROSS))


def test_passes_with_other_rows_are_not_joined(gpt: Model) -> None:
    with capture_attention(gpt.network) as traces:
        gpt.generate(TEXT, max_new_tokens=2)
        gpt.generate([TEXT, TEXT], max_new_tokens=2)
    with pytest.raises(UserError, match="not steps of one call"):
        traces.joined(SELF)


def test_earlier_passes_keep_their_keys(gpt: Model) -> None:
    with capture_attention(gpt.network) as traces:
        gpt.generate(TEXT, draft="prompt-lookup", max_new_tokens=12)  # rejected draft tokens are overwritten
    for trace in traces.passes[SELF]:
        groups = trace.q.shape[1] // trace.k.shape[1]
        scores = trace.q @ trace.k.repeat_interleave(groups, 1).transpose(-2, -1) / trace.q.shape[-1] ** 0.5
        expected = scores.masked_fill(trace.weights == 0, -torch.inf).softmax(-1)
        torch.testing.assert_close(trace.weights, expected)


def test_capturing_does_not_change_the_text_and_ends_with_the_block(translator: Model) -> None:
    before = [each.text for each in translator.translate([TEXT, "the dog"], beam=3)]
    with capture_attention(translator.network):
        assert translator.inference_network is translator.network
        assert [each.text for each in translator.translate([TEXT, "the dog"], beam=3)] == before
    assert translator.inference_network is translator.optimized_network is not translator.network


def test_nothing_captured_is_an_error(gpt: Model, translator: Model) -> None:
    with pytest.raises(UserError, match="no attention layer"), capture_attention(gpt.network):
        translator.translate(TEXT)
    with (
        gpt.engine() as engine,
        pytest.raises(UserError, match="make the engine inside"),
        capture_attention(gpt.network),
    ):
        engine.submit(TEXT, max_new_tokens=2).result()
    with pytest.raises(KeyError), capture_attention(gpt.network):
        raise KeyError


def test_an_optimized_network_is_refused(gpt: Model) -> None:
    with pytest.raises(UserError, match="optimized for inference"), capture_attention(gpt.optimized_network):
        gpt.generate(TEXT)
