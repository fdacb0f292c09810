"""An engine that calls from any thread share, without a thread of its own: whoever waits for a text steps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from clearhead.config import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference.engine import Engine
from clearhead.inference.output import GenerationOutput
from clearhead.inference.request import EngineRequest, TokenIds, check_seeds, validate
from clearhead.inference.sampling import sample_seeds


class SharedEngine:
    """Generation with an engine; a step advances the texts of all threads, and equal prompts are computed once."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.failed = False  # an error or Ctrl-C in the middle of a step: the engine cannot be used any more
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Sequence[TokenIds],
        config: GenerationConfig,
        *,
        seeds: Sequence[int],
        sources: Sequence[TokenIds] | None = None,
        stop: Sequence[str] = (),
    ) -> list[list[GenerationOutput]]:
        """Return `samples` outputs for each prompt; prompt n draws from seeds[n]."""
        validate(self.engine.model, prompts, sources, config, self.engine.eos_ids)
        check_seeds(seeds)
        single = config.model_copy(update={"samples": 1, "align": False})
        requests: list[EngineRequest] = []
        try:
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
                source = None if sources is None else sources[number]
                for sample_seed in sample_seeds([seed], config.samples):
                    requests.append(self._submit(prompt, single, sample_seed, source, stop, text=False))
            for request in requests:
                while not request.done:
                    self._step(request)
                if request.error is not None:
                    raise request.error
        finally:
            self._cancel(requests)
        outputs = [request.output or GenerationOutput([], finished=False) for request in requests]
        return [outputs[begin : begin + config.samples] for begin in range(0, len(outputs), config.samples)]

    def stream(
        self,
        prompt: TokenIds,
        config: GenerationConfig,
        *,
        seed: int = 0,
        source: TokenIds | None = None,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """Yield a text in pieces of complete characters; closing the iterator cancels the request."""
        if config.beam > 1 or config.samples > 1:
            raise UserError("streaming decodes one sequence, greedily or by sampling; use beam=1 and samples=1")
        request = self._submit(prompt, config, seed, source, stop, text=True)

        def pieces() -> Iterator[str]:
            try:
                while True:
                    done = request.done  # read before the text: a request that is done gets no more
                    if piece := request.take_text():
                        yield piece
                    elif request.error is not None:
                        raise request.error
                    elif done:
                        return
                    else:
                        self._step(request)
            finally:
                self._cancel([request])

        return pieces()

    def _submit(
        self,
        prompt: TokenIds,
        config: GenerationConfig,
        seed: int,
        source: TokenIds | None,
        stop: Sequence[str],
        text: bool,
    ) -> EngineRequest:
        with self._lock:
            return self.engine.submit(prompt, config, seed=seed, source=source, stop=stop, text=text)

    def _step(self, request: EngineRequest) -> None:
        """Step the engine, unless another thread has finished the request meanwhile."""
        with self._lock:
            if self.failed:
                raise RuntimeError("the engine has failed in another thread; call again")
            if request.done:
                return
            self.failed = True
            self.engine.step()
            self.failed = False

    def _cancel(self, requests: Sequence[EngineRequest]) -> None:
        with self._lock:
            for request in requests:
                if not self.failed:
                    self.engine.cancel(request)
