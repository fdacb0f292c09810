"""Messages never become special tokens, whatever they say and whatever a chat template does with them."""

import os
import random
import string
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine
from transformers import PreTrainedTokenizerFast

from clearhead.predict.chat import Transcript
from clearhead.predict.template import Template, Turn
from clearhead.text import Tokenizer
from tests.predict.chat_templates import FAMILIES, Family

DIALOGUES = int(os.environ.get("CLEARHEAD_DIALOGUES", "10"))  # of each family
SPEAKERS = ("user", "assistant")
Messages = list[tuple[str, str]]


def byte_level(specials: tuple[str, ...]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Engine(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    return Tokenizer(engine)


def unigram(specials: tuple[str, ...]) -> Tokenizer:
    """A vocabulary that has its special tokens among its pieces, as that of XLM-R."""
    letters = [("▁", -2.0), *((letter, -5.0) for letter in sorted({*string.printable, *"".join(specials)}))]
    names = [("<unk>", 0.0), *((name, 0.0) for name in specials if name != "<unk>")]
    engine = Engine(models.Unigram([*names, *letters], 0))
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    engine.pre_tokenizer = pre_tokenizers.Metaspace()
    engine.decoder = decoders.Metaspace()
    engine.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    return Tokenizer(engine)


def template_of(family: Family, tokenizer: Tokenizer) -> Template:
    form = Template(family.template, tokenizer)
    form.names = {"bos_token": family.bos, "eos_token": family.eos}
    return form


def markers(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [each for each in ids if each in tokenizer.marker_ids]


def hostile_dialogues(family: Family, seed: int, count: int) -> Iterator[tuple[Messages, Messages]]:
    """Dialogues that spell special tokens in every way, and harmless ones of the same shape."""
    rng = random.Random(seed)

    def forgery() -> str:
        name = rng.choice(family.specials)
        cut = rng.randrange(len(name) + 1)
        halves = name[:cut], name[cut:]
        usual = ["hello", "what is 2 < 3 | 4 > 1?", "</think>\n", "\n\n", "", "{{ bos_token }}", "𗀀𗀁", "k"]
        return str(rng.choice([
            name, *halves, name.join(halves), "~".join(halves), "x".join(halves), f" {name} ", f"x{name}", name[1:-1],
            name.strip("<>[]|/"), name[::-1], name.upper(), name.lower(), name.swapcase(),
            name.replace("<", "＜").replace("s", "ſ"), "".join(map("&#{};".format, map(ord, name))), rng.choice(usual),
        ]))  # fmt: skip

    for _ in range(count):
        roles = [*(["system"] if rng.random() < 0.5 else []), *SPEAKERS * rng.randrange(3), "user"]
        hostile = ["".join(forgery() for _ in range(rng.randrange(1, 5))) for _ in roles]
        harmless = ["a" if text.strip() else text for text in hostile]
        yield list(zip(roles, hostile, strict=True)), list(zip(roles, harmless, strict=True))


@pytest.mark.parametrize("build", [byte_level, unigram])
@pytest.mark.parametrize("name", FAMILIES)
def test_special_tokens_are_those_of_a_harmless_dialogue(name: str, build: Any) -> None:
    family = FAMILIES[name]
    tokenizer = build(family.specials)
    form = template_of(family, tokenizer)
    for number, (hostile, harmless) in enumerate(hostile_dialogues(family, 24, DIALOGUES)):
        expected = markers(tokenizer, form.ids(harmless))
        assert markers(tokenizer, form.ids(hostile)) == expected, (number, hostile)
        assert expected or name == "alpaca"
    form.renderer.close()
    print(f"{name}: {DIALOGUES} dialogues")


@pytest.mark.parametrize("name", FAMILIES)
def test_harmless_dialogues_have_the_ids_of_transformers(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = byte_level(family.specials)
    form = template_of(family, tokenizer)
    names = {name: value for name, value in (("bos_token", family.bos), ("eos_token", family.eos)) if value}
    theirs = PreTrainedTokenizerFast(tokenizer_object=Engine.from_str(tokenizer.engine.to_str()), **names)
    texts = ["  What is 2 < 3 | 4 > 1?\n", "<think>\nSo [it] is.\n</think>\n\nTrue: Ärger, 你好 ~ Kind's. ", "ok  "]
    for roles in (["user"], ["system", "user"], ["system", "user", "assistant", "user"], [*SPEAKERS, "user"]):
        messages = [(role, texts[number % 3]) for number, role in enumerate(roles)]
        listed = [{"role": role, "content": text} for role, text in messages]
        expected: Any = theirs.apply_chat_template(
            listed, chat_template=family.template, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert form.ids(messages) == expected
    form.renderer.close()


@pytest.mark.parametrize("build", [byte_level, unigram])
def test_prompts_and_transcripts_have_no_special_tokens(build: Any) -> None:
    for family in FAMILIES.values():
        tokenizer = build(family.specials)
        for hostile, _ in hostile_dialogues(family, 25, 20):
            texts = [text for _, text in hostile]
            prompts = [*texts, Transcript().prompt(texts[0], [Turn(text) for text in texts])]
            assert not any(markers(tokenizer, ids) for ids in tokenizer.encode_batch(prompts))
