"""Write a commented recipe for data files: a small model that trains on a laptop, for the task that was guessed."""

import json
import re
from pathlib import PurePath
from typing import Any, NamedTuple

from clearhead.config.data import DEFAULT_VOCAB_SIZE
from clearhead.data.guess_task import Guess

BATCH_TOKENS = 4096
EPOCHS = 10
MIN_STEPS, MAX_STEPS = 100, 4000
MAX_CHARS_PER_TOKEN = 3  # of a tokenizer trained on little text, for bounds
FINE_TUNING_LR = "5.0e-5"
FIRST_SIZE = 264  # of a byte-level tokenizer: the bytes and special tokens


class Plan(NamedTuple):
    """What a task needs of a recipe."""

    preset: str
    lr: str
    metric: str
    comment: str  # of the preset


TRANSLATOR = "encoder and decoder of the 2017 paper, small"
ENCODER = "a small BERT; for better results, `init_from: minilm` after `clearhead pull minilm`"
PLANS = {
    "translation": Plan("tiny-translator", "1.0e-3", "bleu", TRANSLATOR),
    "language-model": Plan("tiny-llama", "1.0e-3", "loss", "a small Llama"),
    "classification": Plan("tiny-encoder", "5.0e-4", "accuracy", ENCODER),
    "regression": Plan("tiny-encoder", "5.0e-4", "spearman", ENCODER),
    "tagging": Plan("tiny-encoder", "5.0e-4", "f1", ENCODER),
    "similarity": Plan("tiny-encoder", "5.0e-4", "spearman", ENCODER),
    "answering": Plan("tiny-encoder", "5.0e-4", "f1", ENCODER),
}
METRICS = {
    "bleu": "`best` is the checkpoint with the highest BLEU on the held-out pairs",
    "loss": "`best` is the checkpoint with the lowest loss on the held-out text",
    "accuracy": "`best` is the checkpoint with the highest accuracy on the held-out records",
    "f1": "`best` is the checkpoint with the highest F1 on the held-out records",
    "spearman": "`best` is the checkpoint with the highest rank correlation on the held-out records",
}


def recipe_name(files: list[str]) -> str:
    """Return a name for the recipe of files: reviews.csv.gz → reviews."""
    name = PurePath(files[0])
    if re.search(r"[*?\[]", name.name):
        name = name.parent
    stem = re.sub(r"\.(gz|\w{1,6})$", "", re.sub(r"\.gz$", "", name.name))
    return re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "recipe"


def write_recipe(guess: Guess, init_from: str | None = None) -> str:
    """Return the text of a recipe for guessed data, to train from scratch or to fine-tune a model."""
    plan = PLANS[guess.task]
    steps = max(MIN_STEPS, min(MAX_STEPS, round(EPOCHS * guess.tokens / BATCH_TOKENS / 100) * 100))
    every = max(1, steps // 10)
    corpus = ", ".join(f"{key}: {_yaml(value)}" for key, value in guess.corpus.items())
    vocab = _vocab_size(guess)
    from_scratch = [
        _line(f"preset: {plan.preset}", f"{plan.comment}"),
        "tokenizer:",
        _line("kind: byte-bpe", "lossless for any language; trained on these texts"),
        *([_line(f"vocab_size: {vocab}", "tokens")] if vocab else []),
    ]
    fine_tuned = [_line(f"init_from: {_yaml(init_from)}", "fine-tuned, with its tokenizer")]
    lr = plan.lr if init_from is None else FINE_TUNING_LR
    lines = [
        f"# {_title(guess)}; written by `clearhead new`.",
        *(f"# {reason}" for reason in guess.reasons),
        "model:",
        *(from_scratch if init_from is None else fine_tuned),
        "data:",
        _line(f"task: {guess.task}", "what to learn"),
        f"  train: {{{corpus}}}",
        _line(f"held_out: {_held_out(guess)}", "fraction kept from training, to validate on"),
    ]
    if guess.text_pairs:
        lines.append(_line("text_pairs: true", "two texts in a record, with a separator token between"))
    if guess.task == "similarity":
        lines.append(_line(f"max_score: {guess.max_score:g}", "score of two texts with the same meaning"))
    if guess.task == "language-model" and guess.corpus["format"] == "text":
        lines.append(_line("documents: file", "or paragraph, heading, line: where a document ends"))
    if guess.task != "answering":
        lines.append(_line(f"max_length: {_max_length(guess)}", f"tokens; {_longer(guess.task)}"))
    lines += [
        _line(f"batch_tokens: {BATCH_TOKENS}", "tokens in a batch, with padding"),
        "train:",
        _line(f"steps: {steps}", "more for better results, while the validation improves"),
        _line(f"lr: {lr}", "highest learning rate; cosine decay to 0"),
        _line(f"warmup: {steps // 20}", "steps until the highest learning rate"),
        _line(f"validate_every: {every}", "steps"),
        _line(f"save_every: {every}", "steps; Ctrl-C saves too, and --resume continues"),
        _line(f"metric: {plan.metric}", METRICS[plan.metric]),
    ]
    return "\n".join(lines) + "\n"


def _line(setting: str, comment: str) -> str:
    return f"  {setting:28} # {comment}"


def _title(guess: Guess) -> str:
    names = ", ".join(guess.corpus["files"])
    records = f"{guess.records:,} records" if guess.records else f"about {guess.tokens:,} tokens"
    return f"{guess.task[:1].upper()}{guess.task[1:].replace('-', ' ')} on {names:.200} ({records})"


def _longer(task: str) -> str:
    match task:
        case "translation":
            return "longer pairs are left out"
        case "language-model":
            return "the text is cut into windows of this length"
    return "longer texts are truncated"


def _held_out(guess: Guess) -> float:
    """Return a fraction that leaves enough to validate on, and most to train on."""
    if guess.task == "language-model":
        return 0.1
    return next(
        (
            share
            for share, records in ((0.02, 20_000), (0.05, 2_000), (0.1, 200), (0.2, 50))
            if guess.records >= records
        ),
        0.3 if guess.records else 0.1,
    )


def _max_length(guess: Guess) -> int:
    if guess.task == "language-model":
        return 128
    wanted = guess.longest // MAX_CHARS_PER_TOKEN * (2 if guess.text_pairs else 1) + 8
    return next((length for length in (32, 64, 128) if length >= wanted), 256)


def _vocab_size(guess: Guess) -> int | None:
    """Return a vocabulary size that the text supports and fills; None: the default."""
    size = FIRST_SIZE + guess.words // 2
    if not guess.words or size >= DEFAULT_VOCAB_SIZE:
        return None
    return size if size < 1000 else size // 100 * 100


def _yaml(value: Any) -> str:
    """Format a value for YAML; JSON strings and lists are YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value) and value.lower() not in YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf")
