"""Answers that match a JSON schema: llguidance says which tokens may follow."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from clearhead.predict.model import Model
from clearhead.serve.errors import ApiError

log = logging.getLogger("clearhead.serve")
PARAM = "response_format"
ANY_OBJECT = {"type": "object"}
WHITESPACE = r"[\n ]{0,2}"  # between tokens of JSON: a small model would write spaces forever
# Bounds of the work for one token and of the memory; llguidance's defaults are for trusted schemas.
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)


class Grammars:
    """Constraints for one model's vocabulary."""

    def __init__(self, model: Model):
        self.tokenizer: llguidance.LLTokenizer | None = None
        try:
            self.tokenizer = llguidance.LLTokenizer(
                model.tokenizers[-1].engine.to_str(),
                n_vocab=model.config.target_vocab,
                eos_token=list(model.special_tokens.eos_ids),
            )
        except ValueError as error:
            log.warning("%s: no JSON schemas, as its tokenizer cannot be constrained (%s)", model.label, error)
        self.vocab = model.config.target_vocab
        self.ends = bool(model.special_tokens.eos_ids)

    def constraint(self, schema: dict[str, Any], max_bytes: int) -> JsonConstraint:
        """Compile a schema."""
        if self.tokenizer is None or not self.ends:
            raise ApiError(400, f"{PARAM}: this model's tokenizer cannot be constrained; leave it out", param=PARAM)
        text = json.dumps(schema)
        if len(text) > max_bytes:
            raise ApiError(400, f"{PARAM}: a schema of {len(text):,} bytes; the limit is {max_bytes:,}", param=PARAM)
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": WHITESPACE})
        except ValueError:  # half of a surrogate pair
            raise ApiError(400, f"{PARAM}: the schema cannot be used (a text is not Unicode)", param=PARAM) from None
        matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            problem = matcher.get_error().splitlines()[0][:200]
            raise ApiError(400, f"{PARAM}: the schema cannot be used ({problem})", param=PARAM)
        return JsonConstraint(matcher, self.vocab)


class JsonConstraint:
    """The state of one sequence."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int):
        self.matcher, self.vocab = matcher, vocab
        self.count = 0  # of the tokens that the matcher has seen

    def copy(self) -> JsonConstraint:
        """The same schema for another sequence."""
        return JsonConstraint(self.matcher.deep_copy(), self.vocab)

    def allowed(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Return which tokens (V,) may follow `ids`."""
        new, self.count = list(ids[self.count :]), len(ids)
        if (new and not self.matcher.consume_tokens(new)) or self.matcher.is_error():
            raise RuntimeError(f"the JSON schema's matcher failed: {self.matcher.get_error()}")
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self.vocab, bitorder="little").astype(bool)
