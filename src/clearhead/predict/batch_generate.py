"""A loaded model behind the batching engine: texts in, texts out, however many there are and whenever they come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from clearhead.config.generation import EngineConfig
from clearhead.inference import Engine, GenerationOutput, Job, StopStrings, in_order
from clearhead.inference.sampling import sample_seeds
from clearhead.model import Decoder, EncoderDecoder
from clearhead.predict.model import GenerationResult, Model
from clearhead.predict.requests import requests

ROOM = 1 << 16  # tokens that the cache may hold, where that is enough for a text that fills the model's context


def engine_for(model: Model, **limits: Any) -> Engine:
    """An engine for a translator or a decoder; limits are those of EngineConfig, like rows=64."""
    family = EncoderDecoder if isinstance(model.network, EncoderDecoder) else Decoder
    network = model._as(family, "generate")
    config = EngineConfig.build({"cache_tokens": max(ROOM, 2 * model.config.max_positions)} | limits)
    return Engine(network, end=model.special_tokens.eos_ids, tokenizer=model.tokenizers[-1], config=config)


def submit(model: Model, engine: Engine, text: str, *, seed: int = 0, stop: Sequence[str] = (), **options: Any) -> Job:
    """Queue a prompt to go on from or, for a translator, a text to translate; options are those of GenerationConfig."""
    [(prompt, source, config)] = requests(model, [text], options)
    if source == []:  # an empty text stays empty
        job = Job(prompt, source, config, seed, 1)
        job.output = GenerationOutput([], finished=True)
        return job
    return engine.submit(prompt, config, seed=seed, source=source, stop=stop)


def generate_batch_texts(
    model: Model,
    prompts: Iterable[str | None],
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    samples: int = 1,
    **options: Any,
) -> Iterator[tuple[str, GenerationResult]]:
    """Each prompt with what the model writes after it, `samples` times, in order: the texts that `generate` gives.

    Prompts are read as there is room for them and many are written at once: a stream of any length takes little memory.
    None among them says that no other is waiting now.
    """
    engine, asked = engine_for(model), dict[Job, str]()
    stops = StopStrings(stop, model.tokenizers[-1]) if stop else None

    def jobs() -> Iterator[Job | None]:
        number = 0
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            for own in sample_seeds([seed + number], samples):
                job = submit(model, engine, prompt, seed=own, stop=stop, **options)
                asked[job] = prompt
                yield job
            number += 1

    for job in in_order(engine, jobs()):
        assert job.output is not None
        yield asked.pop(job), model._text(job.output, stops=stops)
