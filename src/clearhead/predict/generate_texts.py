"""Text to text: what `generate`, `translate`, `stream` and `alternatives` of a model do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from clearhead.config.generation import GenerationConfig
from clearhead.errors import UserError
from clearhead.inference import (
    DraftModel,
    GenerationOutput,
    PromptLookup,
    StopStrings,
    alternatives,
    generate,
    has_hooks,
    stream_text,
    translate,
)
from clearhead.inference.alignment import add_alignments
from clearhead.inference.speculative import Draft
from clearhead.model import Decoder, EncoderDecoder
from clearhead.predict.align import align_words, alignment_heads
from clearhead.predict.check_arguments import check_ids, check_number, check_string
from clearhead.predict.engines import shared_engine, step_network
from clearhead.predict.requests import check_sizes, generation_config, needed_tokens, requests
from clearhead.predict.results import GenerationResult, Translation, ranked

if TYPE_CHECKING:
    from clearhead.predict.model import Model

PROMPT_LOOKUP = "prompt-lookup"


def generate_texts(
    model: Model,
    prompts: Sequence[str],
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    draft: Model | str | None = None,
) -> list[GenerationResult]:
    """Continue each prompt; prompt n draws from seed + n."""
    model.check_family(Decoder, "generate")
    check_number("seed", seed, 0)
    stops, draft_model = stop_strings(model, stop), find_draft(model, draft)
    request_list = requests(model, prompts, options)
    wanted = request_list[0].config if request_list else generation_config(model, options)
    config = whole_beam(wanted)
    if config.align:
        raise UserError("align: only a translator has a source to align with; set it to false")
    rows, seeds = [request.prompt for request in request_list], [seed + number for number in range(len(request_list))]
    if uses_engine(model, config, draft_model):
        outputs = shared_engine(model).generate(rows, config, seeds=seeds, stop=stops.strings if stops else ())
    else:
        outputs = generate(
            step_network(model),
            rows,
            config,
            eos_ids=model.special_tokens.eos_ids,
            seeds=seeds,
            stop_strings=stops,
            draft=draft_model,
        )
    return [ranked([to_result(model, output, stops=stops) for output in row], wanted.n_best) for row in outputs]


def translate_texts(
    model: Model,
    texts: Sequence[str],
    options: Mapping[str, Any],
    *,
    prefixes: Sequence[str] | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    draft: Model | str | None = None,
) -> list[Translation]:
    """Translate each text; text n draws from seed + n, and an empty text stays empty."""
    model.check_family(EncoderDecoder, "translate")
    check_number("seed", seed, 0)
    stops, draft_model = stop_strings(model, stop), find_draft(model, draft)
    request_list = requests(model, texts, options, prefixes)
    used = [number for number, request in enumerate(request_list) if request.source]
    limits = [request.config.max_new_tokens for request in request_list]
    longest = {"max_new_tokens": max((limits[number] for number in used), default=1)}
    groups = dict[GenerationConfig, list[int]]()  # beam search takes sources with any limits together
    for number in used:
        config = request_list[number].config
        groups.setdefault(config.model_copy(update=longest) if config.beam > 1 else config, []).append(number)
    results = [Translation("") for _ in texts]
    for config, numbers in groups.items():
        rows = [request_list[number].prompt for number in numbers]
        starts = [row[1:] for row in rows]
        sources = [request_list[number].source or [] for number in numbers]
        seeds = [seed + number for number in numbers]
        if uses_engine(model, config, draft_model):
            stop_texts = stops.strings if stops else ()
            outputs = shared_engine(model).generate(rows, config, seeds=seeds, sources=sources, stop=stop_texts)
        else:
            outputs = translate(
                step_network(model),
                sources,
                whole_beam(config).model_copy(update={"align": False}),
                bos_id=model.special_tokens.begin[0],
                eos_ids=model.special_tokens.eos_ids,
                prefixes=starts,
                limits=[limits[number] for number in numbers],
                seeds=seeds,
                stop_strings=stops,
                draft=draft_model,
            )
        if config.align:
            network = model.inference_network_for(EncoderDecoder, "translate")
            outputs = add_alignments(network, sources, rows, outputs, alignment_heads(model))
        for number, start, row in zip(numbers, starts, outputs, strict=True):
            candidates = [to_result(model, output, start, stops, texts[number]) for output in row]
            results[number] = ranked(candidates, config.n_best)
    return results


def stream_pieces(
    model: Model,
    prompt: str | Sequence[int],
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    stop: Sequence[str] = (),
    draft: Model | str | None = None,
) -> Iterator[str]:
    """The text of `generate` in pieces; a prompt of ids is used as is."""
    model.check_family(Decoder, "stream")
    draft_model = find_draft(model, draft)
    check_number("seed", seed, 0)
    stop_strings(model, stop)  # only to check them
    if isinstance(prompt, str):
        [(row, _, config)] = requests(model, [prompt], options)
    else:
        check_ids("stream", prompt)
        row, config = list(prompt), generation_config(model, options)
        check_sizes(model, "prompt", [row], needed_tokens(config, options))
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if uses_engine(model, config, draft_model):
        return shared_engine(model).stream(row, config, seed=seed, stop=stops)
    return stream_text(
        step_network(model),
        row,
        config,
        model.tokenizer,
        eos_ids=model.special_tokens.eos_ids,
        seed=seed,
        stop=stops,
        draft=draft_model,
    )


def uses_engine(model: Model, config: GenerationConfig, draft: Draft | None) -> bool:
    """Whether the engine generates these texts: on a CPU all but beams, drafts and hooked networks."""
    return model.device.type == "cpu" and config.beam == 1 and draft is None and not has_hooks(model.network)


def alternative_texts(
    model: Model, text: str, count: int, options: Mapping[str, Any], *, prefix: str = "", seed: int = 0
) -> list[GenerationResult]:
    """Complete the text once for each of the `count` most likely next tokens."""
    is_translator = isinstance(model.network, EncoderDecoder)
    model.check_family(EncoderDecoder if is_translator else Decoder, "alternatives")
    check_number("count", count, 1)
    check_number("seed", seed, 0)
    check_string("prefix", prefix)
    if prefix and not is_translator:
        raise UserError("prefix: only translators support it; leave it out")
    [(prompt, source, config)] = requests(model, [text], options, [prefix] if prefix else None)
    if source == []:
        raise UserError("alternatives: the text is empty; give some text")
    outputs = alternatives(
        step_network(model), prompt, count, config, eos_ids=model.special_tokens.eos_ids, source=source, seed=seed
    )
    return [to_result(model, output, prompt[1:] if is_translator else ()) for output in outputs]


def whole_beam(config: GenerationConfig) -> GenerationConfig:
    """The config of a search for an n-best list: all hypotheses, as several may have the same text."""
    return config.model_copy(update={"n_best": config.beam}) if config.n_best > 1 else config


def to_result(
    model: Model,
    output: GenerationOutput,
    prefix: Sequence[int] = (),
    stops: StopStrings | None = None,
    source: str = "",
) -> Any:
    """Decode an output: a Translation of a translator, else a GenerationResult; `prefix` is part of the text."""
    text = model.tokenizers[-1].decode([*prefix, *output.ids])
    fields: dict[str, Any] = {
        "text": text if stops is None else stops.truncate(text),
        "score": output.score,
        "finished": output.finished,
        "ids": tuple(output.ids),
        "logprobs": None if output.logprobs is None else tuple(output.logprobs),
    }
    if not isinstance(model.network, EncoderDecoder):
        return GenerationResult(**fields)
    if output.alignment is None:
        return Translation(**fields)
    return Translation(**fields, alignment=align_words(model, source, [*prefix, *output.ids], output.alignment))


def stop_strings(model: Model, stop: Sequence[str]) -> StopStrings | None:
    """Stop strings of the tokenizer that decodes; None without any."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Sequence | Set) or not all(isinstance(each, str) and each for each in stop):
        raise UserError("stop: not a list of strings with at least one character each; leave empty ones out")
    return StopStrings(stop, model.tokenizers[-1]) if stop else None


def find_draft(model: Model, draft: Model | str | None) -> Draft | None:
    """The draft of speculative decoding: a smaller model (or its name), or "prompt-lookup"."""
    if draft is None:
        return None
    if draft == PROMPT_LOOKUP:
        return PromptLookup()
    drafts: dict[str, Model] = model.engines.setdefault("drafts", {})
    other = drafts.get(draft) if isinstance(draft, str) else draft
    if other is None:
        from clearhead.predict.load import load  # here: it imports this module

        other = drafts[str(draft)] = load(str(draft), str(model.device))
    if not hasattr(other, "network"):
        kind = type(other).__name__
        raise UserError(f"draft: {kind} is not a model; give a loaded model, its name, or {PROMPT_LOOKUP!r}")
    if type(other.network) is not type(model.network):
        raise UserError(f"draft: {other.label} is {other.kind}, but {model.label} is {model.kind}; use the same family")
    if [each.vocabulary for each in other.tokenizers] != [each.vocabulary for each in model.tokenizers]:
        raise UserError(
            f"draft: {other.label} has another vocabulary than {model.label}; use a model with the same tokenizer, or "
            f"draft={PROMPT_LOOKUP!r}"
        )
    return DraftModel(step_network(other))
