"""A model behind the batching engine: streams of prompts, and requests from any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, Unpack

from clearhead.errors import ConfigError, UserError
from clearhead.inference import (
    Engine,
    EngineRequest,
    EngineThread,
    GenerationOutput,
    StopStrings,
    run_in_order,
)
from clearhead.inference.sampling import sample_seeds
from clearhead.predict.engines import new_engine
from clearhead.predict.generate_texts import stop_strings, to_result
from clearhead.predict.model import Model
from clearhead.predict.options import EngineOptions, GenerationOptions
from clearhead.predict.requests import requests
from clearhead.predict.results import GenerationResult


def engine_for(model: Model, **limits: Unpack[EngineOptions]) -> Engine:
    """An engine for a translator or a decoder; limits are those of EngineConfig, like max_batch_size=64."""
    return new_engine(model, dict(limits))


def submit(
    model: Model,
    engine: Engine | EngineThread,
    text: str,
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    **options: Unpack[GenerationOptions],
) -> EngineRequest:
    """Queue a prompt to continue or, for a translator, a text to translate; options are those of GenerationConfig."""
    [(prompt, source, config)] = requests(model, [text], options)
    if source == []:  # an empty text stays empty
        request = EngineRequest(prompt, source, config, seed, 1)
        request.output = GenerationOutput([], finished=True)
        return request
    return engine.submit(prompt, config, seed=seed, source=source, stop=stop)


def generate_batch_texts(
    model: Model,
    prompts: Iterable[str | None],
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    samples: int = 1,
    on_error: Callable[[UserError], None] | None = None,
    **options: Any,
) -> Iterator[tuple[str, GenerationResult]]:
    """Yield each prompt with its generated text, `samples` times, in order; the texts equal those of `generate`.

    Prompts are read as rows of the batch become free, so that a stream of any length takes little memory. None among
    them means that no prompt is available now. `on_error` is called for a prompt that cannot be used, which is left
    out unless `on_error` raises; without it, the error ends the work.
    """
    engine, prompt_of = engine_for(model), dict[EngineRequest, str]()
    stops = stop_strings(model, stop)

    def submit_all() -> Iterator[EngineRequest | None]:
        number = 0
        for prompt in prompts:
            if prompt is None:
                yield None
                continue
            for sample_seed in sample_seeds([seed + number], samples):
                try:
                    request = submit(model, engine, prompt, seed=sample_seed, stop=stop, **options)
                except UserError as error:
                    if on_error is None or isinstance(error, ConfigError):  # wrong options are wrong for all prompts
                        raise
                    on_error(error)
                    break
                prompt_of[request] = prompt
                yield request
            number += 1

    for request in run_in_order(engine, submit_all()):
        prompt = prompt_of.pop(request)
        if request.output is not None:
            yield prompt, to_result(model, request.output, stops=stops)
        elif request.error is not None:
            if on_error is None or not isinstance(request.error, UserError):
                raise request.error
            on_error(request.error)


class ModelEngine:
    """The batching engine of a model on its own thread; any thread may submit texts.

    with model.engine(max_batch_size=64) as engine:
        requests = [engine.submit(prompt, max_new_tokens=50) for prompt in prompts]
        for piece in requests[0]:
            print(piece, end="")
        texts = [request.result().text for request in requests]
    """

    def __init__(self, model: Model, **limits: Unpack[EngineOptions]):
        self.model = model
        self.worker = EngineThread(engine_for(model, **limits))

    def submit(
        self, text: str, *, seed: int = 0, stop: Sequence[str] = (), **options: Unpack[GenerationOptions]
    ) -> Request:
        """Queue a prompt to continue or, for a translator, a text to translate; raises QueueFull if too many wait."""
        stops = stop_strings(self.model, stop)
        return Request(self, submit(self.model, self.worker, text, seed=seed, stop=stop, **options), stops)

    def close(self) -> None:
        """Cancel all requests and stop the thread."""
        self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Request:
    """A submitted text: iterate over it for pieces as they are generated, or wait for its `result`."""

    def __init__(self, engine: ModelEngine, engine_request: EngineRequest, stops: StopStrings | None):
        self.engine, self.engine_request, self.stops = engine, engine_request, stops

    def __iter__(self) -> Iterator[str]:
        """The text in pieces; leaving the loop early cancels the request."""
        return self.engine.worker.stream(self.engine_request)

    def result(self) -> GenerationResult:
        """Wait for the text; a cancelled request has what was generated so far, unfinished."""
        output = self.engine.worker.result(self.engine_request)
        if output is None:
            output = GenerationOutput(list(self.engine_request.ids), finished=False)
        result: GenerationResult = to_result(self.engine.model, output, stops=self.stops)
        return result

    def cancel(self) -> None:
        """Stop generating and free the row."""
        self.engine.worker.cancel(self.engine_request)
