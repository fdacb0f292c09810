"""A served text is the local text with the same seed and options: alone, and among 64 requests of mixed tasks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from clearhead.predict import Model
from tests.serve.running import Running

PROMPTS = ("It was a bright cold day", "She said", "The old house", "In the garden", "He opened the door and")
SENTENCES = ("Two dogs are playing in the snow.", "Where is the station?", "I like to read books.", "A man sleeps.")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
    {"stop": ["the", "."]},
)
Case = tuple[str, dict[str, Any], Any]  # path, body, what the local call gives


def local_cases(models: dict[str, Model]) -> list[Case]:
    """64 requests and what the local models give for them."""
    cases: list[Case] = []
    gpt, translator, bert = (models[name] for name in ("novels-gpt", "en-de", "novels-bert"))
    for number in range(24):
        prompt, options = PROMPTS[number % len(PROMPTS)], OPTIONS[number % len(OPTIONS)]
        body = {"prompt": prompt, "max_tokens": 5 + 2 * number, "seed": number, "stream": False, **options}
        local = {"temperature": 1.0, **options}
        result = gpt.generate(prompt, seed=number, max_new_tokens=5 + 2 * number, **local)
        cases.append(("/v1/completions", body, result.text))
    for number in range(12):
        text = f"{PROMPTS[number % len(PROMPTS)]} {number}?"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 20, "seed": number, "temperature": 0.9}
        cases.append(
            ("/v1/chat/completions", body, gpt.chat(seed=number, temperature=0.9, max_new_tokens=20).ask(text))
        )
    for number in range(16):
        sentence = f"{SENTENCES[number % len(SENTENCES)]} {number}"
        beam = 1 + 2 * (number % 3)
        body = {"q": sentence, "source": "en", "target": "de", "beam": beam}
        cases.append(("/translate", body, translator.translate(sentence, beam=beam).text))
    for number in range(6):
        masked = f"{PROMPTS[number % len(PROMPTS)]} [MASK] {number}."
        cases.append(("/v1/fill", {"input": masked}, bert.fill(masked).text))
    for number in range(6):
        text = SENTENCES[number % len(SENTENCES)] * (1 + number)
        cases.append(("/v1/embeddings", {"input": text, "model": "novels-bert"}, bert.embed(text)))
    assert len(cases) == 64
    return cases


READ: dict[str, Callable[[Any], Any]] = {
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/translate": lambda answer: answer["translatedText"],
    "/v1/fill": lambda answer: answer["data"][0]["text"],
    "/v1/embeddings": lambda answer: np.array(answer["data"][0]["embedding"]),
}


@pytest.mark.parametrize("at_once", [1, 64])
def test_served_is_local_alone_and_among_others(running: Running, packaged: dict[str, Model], at_once: int) -> None:
    cases = local_cases(packaged)
    with running.client() as client, ThreadPoolExecutor(at_once) as pool:

        def served(case: Case) -> Any:
            answer = client.post(case[0], json=case[1])
            assert answer.status_code == 200, answer.text
            return READ[case[0]](answer.json())

        order = cases if at_once == 1 else [cases[(7 * number) % 64] for number in range(64)]  # tasks mixed
        for (path, body, local), found in zip(order, pool.map(served, order), strict=True):
            if path == "/v1/embeddings":
                np.testing.assert_allclose(found, local, atol=1e-5)
            else:
                assert found == local, body
