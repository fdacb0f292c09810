"""`clearhead info` and `clearhead models`: describe a model, list the available models."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.options import ModelName
from clearhead.cli.output import echo, echo_json, say
from clearhead.cli.presets import format_bytes, format_count
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.checkpoint import ModelFolderInfo
    from clearhead.config.model import ModelConfig

MAX_LANGUAGES = 8  # shown
STORED_DTYPES = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16", "I8": "int8", "U8": "int4"}


def info(
    model: ModelName,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show a model's architecture, parameters, memory, tokenizer, recipe, scores and supported commands.

    Example: clearhead info en-de
    """
    from clearhead.checkpoint import model_folder_info
    from clearhead.predict import find_model

    data = _model_info(model, model_folder_info(find_model(model)))
    if as_json:
        echo_json(data, indent=2)
        return
    fields = {key: value for key, value in _format_info(data).items() if value.strip()}
    width = max(map(len, fields))
    for key, value in fields.items():
        first, *rest = value.strip().splitlines()
        echo("\n".join([f"{key:{width}}  {first}", *(" " * (width + 2) + line for line in rest)]))


def _model_info(name: str, about: "ModelFolderInfo") -> dict[str, Any]:
    """Everything that is known without reading the weights."""
    import torch

    from clearhead.config.model import supported_commands
    from clearhead.inference.native_network import native_refuses
    from clearhead.model import build
    from clearhead.model.cost import model_cost, parameters_by_part

    config, card = about.config, about.card
    cost, network = model_cost(config, dtype=torch.float32), build(config, "meta")
    refused = native_refuses(network) if config.decoder_layers else ""
    return {
        "name": name,
        "folder": str(about.folder),
        "summary": card.summary,
        "commands": supported_commands(config) if about.tokenizers else [],
        "missing": "" if about.tokenizers else _missing(config),
        "family": config.family,
        "architecture": {key: value for key, value in config.model_dump(mode="json").items() if value is not None},
        "parameters": cost.parameters,
        "parts": parameters_by_part(network),
        "file_bytes": about.weight_bytes,
        "dtype": STORED_DTYPES.get(about.stored_as, about.stored_as),
        "memory_bytes": cost.weight_bytes,
        "cache_bytes": cost.cache_bytes,
        "flops_per_token": cost.flops_per_token,
        "cpu_step": "" if refused == "" else "native" if refused is None else f"reference ({refused})",
        "tokenizers": [
            {"kind": type(each.engine.model).__name__, "vocab_size": len(each), "roles": list(each.roles)}
            for each in about.tokenizers
        ],
        "data": list(card.data),
        "scores": [vars(score) for score in card.scores],
        "recipe": card.recipe,
        **_special(about),
        "sampling": about.extra.get("sampling") or {},
        "source": str(about.extra.get("source") or ""),
        "license": card.license,
    }


def _special(about: "ModelFolderInfo") -> dict[str, Any]:
    """Tokens before every text and after the last, languages, and whether there is a chat template."""
    extra, tokens = about.extra, about.tokenizers[-1].engine.id_to_token if about.tokenizers else lambda token_id: None
    return {
        "begin": [tokens(token_id) or str(token_id) for token_id in extra.get("begin") or []],
        "eos": [tokens(token_id) or str(token_id) for token_id in extra.get("eos_ids") or []],
        "languages": list(extra.get("languages") or {}),
        "src_lang": extra.get("src_lang"),
        "tgt_lang": extra.get("tgt_lang"),
        "chat_template": bool(extra.get("chat_template")),
    }


def _missing(config: "ModelConfig") -> str:
    """What a model without a tokenizer cannot do."""
    from clearhead.config.model import supported_commands

    commands = ", ".join(supported_commands(config))
    return f"tokenizer.json; without it this model works on token ids only, in Python (logits), and cannot {commands}"


def _format_languages(data: dict[str, Any]) -> str:
    codes = data["languages"]
    shown = ", ".join(codes[:MAX_LANGUAGES]) + (", …" if len(codes) > MAX_LANGUAGES else "")
    default = " → ".join(str(data[key] or "?") for key in ("src_lang", "tgt_lang"))
    return f"{len(codes)}: {shown}\ndefault {default}" if codes else ""


def _format_info(data: dict[str, Any]) -> dict[str, str]:
    """Format the fields as text."""
    config, parts = data["architecture"], data["parts"]
    layers = " + ".join(str(config[key]) for key in ("encoder_layers", "decoder_layers") if config[key])
    part_width = max(map(len, parts))
    tokenizers = [
        f"{each['kind']}, {each['vocab_size']:,} tokens" + f" ({', '.join(each['roles'])})" * bool(each["roles"])
        for each in data["tokenizers"]
    ]
    return {
        "name": data["name"],
        "folder": data["folder"],
        "summary": data["summary"],
        "commands": ", ".join(data["commands"]),
        "missing": data["missing"],
        "family": data["family"],
        "architecture": f"{layers} layers, dim {config['dim']:,}, {config['heads']} heads "
        f"({config['kv_heads']} key-value heads), ff_dim {config['ff_dim']:,} ({config['activation']})\n"
        f"{config['norm']} norm, {config['norm_position']}; {config['position']} positions, "
        f"{config['max_positions']:,}; attention {', '.join(config['attention'])}",
        "parameters": f"{data['parameters']:,}\n"
        + "\n".join(f"{part:{part_width}} {count:>14,}" for part, count in parts.items()),
        "file": f"{format_bytes(data['file_bytes'])}, {data['dtype']}",
        "memory": f"{format_bytes(data['memory_bytes'])} in fp32"
        + (f", KV cache {format_bytes(data['cache_bytes'])} per sequence at full context" * bool(data["cache_bytes"])),
        "FLOPs": f"{format_count(data['flops_per_token'])} per token",
        "CPU step": data["cpu_step"],
        "tokenizer": "\n".join(tokenizers),
        "begins with": " ".join(data["begin"]),
        "ends at": ", ".join(data["eos"]),
        "languages": _format_languages(data),
        "chat": "chat template" if data["chat_template"] else "",
        "sampling": ", ".join(f"{key} {value:g}" for key, value in data["sampling"].items()),
        "data": "\n".join(data["data"]),
        "scores": "\n".join(map(_format_score, data["scores"])),
        "recipe": data["recipe"],
        "source": data["source"],
        "license": data["license"],
    }


def _format_score(score: dict[str, Any]) -> str:
    signature = f" ({score['signature']})" if score["signature"] else ""
    return f"{score['metric']} {score['value']:g} on {score['data']}{signature}"


def models(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False) -> None:
    """List packaged models, pulled models, and runs in ./runs.

    Example: clearhead models
    """
    from clearhead.checkpoint.formats.pull import pulled_models
    from clearhead.predict.find import local_models, packaged_models

    sources = {"package": packaged_models(), "pulled": pulled_models(), "runs": local_models()}
    rows = [_model_row(name, folder, source) for source, known in sources.items() for name, folder in known.items()]
    if as_json:
        echo_json(rows, indent=2)
        return
    if not rows:
        say("no models; train one with `clearhead train mini-en-de`, then `clearhead translate runs/mini-en-de`")
        return
    table = [("name", "family", "parameters", "file", "score", "description")]
    for row in rows:
        size = ("", "") if row["problem"] else (format_count(row["parameters"]), format_bytes(row["file_bytes"]))
        table.append((row["name"], row["family"], *size, row["score"], row["problem"] or row["description"]))
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    for *cells, last in table:
        echo("  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), last]).rstrip())


def _model_row(name: str, folder: Path, source: str) -> dict[str, Any]:
    """A row of the list; a damaged model has its problem in it."""
    from clearhead.checkpoint import model_folder_info
    from clearhead.config.model import supported_commands
    from clearhead.model import build
    from clearhead.model.cost import count_parameters

    row: dict[str, Any] = {"name": name, "folder": str(folder), "source": source, "problem": ""}
    try:
        about = model_folder_info(folder)
    except UserError as error:
        empty = {"family": "", "parameters": None, "file_bytes": None, "score": "", "description": ""}
        return row | empty | {"problem": str(error)}
    score = next((f"{score.metric} {score.value:g} on {score.data}" for score in about.card.scores), "")
    data = about.extra.get("data")
    task = str(data.get("task", "")) if isinstance(data, dict) else ""
    return row | {
        "family": about.config.family,
        "parameters": count_parameters(build(about.config, "meta")),
        "file_bytes": about.weight_bytes,
        "score": score,
        "description": about.card.summary.partition("\n")[0] or task or supported_commands(about.config)[0],
    }
