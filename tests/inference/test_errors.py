"""Invalid prompts, options and settings are refused with a message that says what to change."""

from typing import Any

import pytest

from clearhead.config import GenerationConfig, ModelConfig
from clearhead.errors import ConfigError, UserError
from clearhead.inference import StopStrings, generate, stream, translate
from clearhead.model import build
from clearhead.text import train

CONFIG = GenerationConfig(max_new_tokens=4)


def gpt() -> Any:
    config = ModelConfig(family="decoder", decoder_layers=1, dim=8, heads=2, vocab_size=12, max_positions=8)
    return build(config).eval()


def translator() -> Any:
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    return build(ModelConfig(family="encoder-decoder", dim=8, heads=2, vocab_size=12, **layers)).eval()


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1] * 9], {}, "prompt 1 has 9 tokens, but the model has 8 positions"),
        ([[1, 12]], {}, "token 12 is outside the vocabulary of 12"),
        ([[-1]], {}, "token -1 is outside"),
        ([[1]], {"seeds": [1, 2]}, "1 prompts, but 2 seeds"),
        ([[1]], {"seeds": [1 << 63]}, "a seed is a 64-bit integer"),
        ([[1]], {"config": GenerationConfig(banned_ids=((3, 99),))}, "banned_ids: token 99"),
        ([[1]], {"config": GenerationConfig(forced_ids=((99,),))}, "forced_ids: token 99"),
    ],
)
def test_invalid_prompts_and_options_are_refused(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(gpt(), prompts, options.pop("config", CONFIG), eos_ids=0, **options)


def test_an_eos_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="eos_ids: token 12 is outside the vocabulary of 12"):
        generate(gpt(), [[1]], CONFIG, eos_ids=12)


def test_no_prompts_give_no_outputs() -> None:
    assert generate(gpt(), [], CONFIG, eos_ids=0) == []
    assert translate(translator(), [], CONFIG, bos_id=1, eos_ids=0) == []


def test_a_network_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="eval"):
        generate(gpt().train(), [[1]], CONFIG, eos_ids=0)


def test_the_number_of_prefixes_must_be_that_of_sources() -> None:
    with pytest.raises(ValueError, match="2 sources, but 1 prefixes"):
        translate(translator(), [[1], [2]], CONFIG, bos_id=1, eos_ids=0, prefixes=[[3]])


def test_beam_search_refuses_stop_strings_and_streams() -> None:
    stop = StopStrings(["x"], train(["some text"], "char", 20))
    with pytest.raises(UserError, match="beam=1"):
        generate(gpt(), [[1]], GenerationConfig(beam=2), eos_ids=0, stop_strings=stop)
    with pytest.raises(UserError, match="beam=1"):
        stream(gpt(), [1], GenerationConfig(beam=2), eos_ids=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 1.0}, "did you mean temperature"),
        ({"temperature": -0.1}, "use 0 or more"),
        ({"temperature": 101.0}, "use at most 100"),
        ({"top_p": 0.0}, "use more than 0"),
        ({"beam": 0}, "use 1 or more"),
        ({"beam": 65}, "use at most 64"),
        ({"max_new_tokens": 1 << 21}, "use at most"),
        ({"beam": 2, "temperature": 1.0}, "temperature: 1, but beam search"),
        ({"beam": 2, "n_best": 3}, "n_best: 3 is more than the beam 2"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: 9 is more than max_new_tokens 8"),
        ({"samples": 2}, "samples: 2, but without a temperature"),
        ({"forced_ids": [[1, 2, 3]], "max_new_tokens": 3}, "forced(_ids)?: 4 tokens with the end"),
        ({"forced_ids": [[1]], "banned_ids": [[1]]}, "is banned too"),
        ({"banned_ids": [[]]}, "banned_ids.0: empty"),
        ({"banned_ids": [[1 << 24]]}, "use less than"),
        ({"early_stopping": "always"}, "use full, likely or never"),
    ],
)
def test_invalid_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        GenerationConfig.build(settings, where="recipe.yaml")
    assert str(caught.value).startswith("recipe.yaml: ")


def test_lists_of_ids_from_files_become_tuples() -> None:
    assert GenerationConfig.build({"banned_ids": [[1, 2], [3]]}).banned_ids == ((1, 2), (3,))
