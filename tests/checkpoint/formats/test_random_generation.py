"""Random configurations of every generative architecture give the tokens of transformers: greedy, and a beam of 4.

In float64, where rounding does not choose between candidates; `test_huggingface.py` has fp32.
CLEARHEAD_CONFIGS=300 sets the number per architecture instead of 5.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings

from clearhead.checkpoint.formats import read_foreign
from clearhead.checkpoint.model_folder import build_with_weights
from clearhead.config.generation import GenerationConfig
from clearhead.inference import generate, translate
from tests.checkpoint.formats.peers import WORDS
from tests.checkpoint.formats.test_random_configs import ModelSettings, bart, gpt, llama, marian, pegasus, qwen
from tests.model.peers import disturb

COUNT = int(os.environ.get("CLEARHEAD_CONFIGS", "5"))
LENGTH, TOKENS = 7, 50
LENGTHS = {"n_positions": 64, "max_position_embeddings": 64}
MIN_DIM = 8  # norms of a smaller dim make equal logits


def has_dim(drawn: ModelSettings) -> bool:
    """Whether the hidden states are large enough for distinct logits."""
    return any(drawn[1].get(key, 0) >= MIN_DIM for key in ("d_model", "n_embd", "hidden_size"))


def saved_peer(drawn: ModelSettings, folder: Path) -> Any:
    """Save a model with room for the prompt and all tokens."""
    name, values = drawn
    values = values | {key: length for key, length in LENGTHS.items() if key in values}
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    theirs = kind(kind.config_class(vocab_size=WORDS, attn_implementation="eager", **values)).eval().double()
    disturb(theirs, 0.3)
    theirs.save_pretrained(folder)
    return theirs


def our_network(folder: Path) -> Any:
    imported = read_foreign(folder)
    return build_with_weights(imported.config, imported.weights)


@pytest.mark.parametrize("family", [llama, qwen, gpt])
def test_decoders_give_the_same_fifty_greedy_tokens(family: Any, tmp_path: Path) -> None:
    @settings(max_examples=COUNT, deadline=None, derandomize=True)
    @given(drawn=family().filter(has_dim))
    @torch.no_grad()
    def check(drawn: ModelSettings) -> None:
        theirs = saved_peer(drawn, tmp_path)
        prompt = torch.randint(WORDS, (1, LENGTH))
        options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        options |= {"use_cache": False}  # transformers' cache of a window of 1 keeps all tokens
        expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, LENGTH:]
        config = GenerationConfig(max_new_tokens=TOKENS)
        results = generate(our_network(tmp_path), prompt.tolist(), config, eos_ids=[])
        assert results[0][0].ids == expected.tolist()

    check()


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("family", [marian, pegasus, bart])
def test_translators_give_the_same_fifty_tokens(family: Any, beam: int, tmp_path: Path) -> None:
    @settings(max_examples=COUNT, deadline=None, derandomize=True)
    @given(drawn=family().filter(has_dim))
    @torch.no_grad()
    def check(drawn: ModelSettings) -> None:
        theirs = saved_peer(drawn, tmp_path)
        padding, start = theirs.config.pad_token_id, theirs.config.decoder_start_token_id
        source = torch.randint(6, 80, (1, LENGTH))
        expected = theirs.generate(
            source, max_new_tokens=TOKENS, do_sample=False, num_beams=beam, eos_token_id=-1, bad_words_ids=[[padding]]
        )[0, 1:]
        config = GenerationConfig(max_new_tokens=TOKENS, beam=beam, banned_ids=((padding,),))
        results = translate(our_network(tmp_path), source.tolist(), config, bos_id=start, eos_ids=[])
        assert results[0][0].ids == expected.tolist()

    check()
