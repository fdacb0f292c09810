"""`clearhead info` and `clearhead models`: what a model is, and which there are."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.presets import amount, memory
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.checkpoint import ModelFolderInfo

FORMATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8", "U8": "int4"}


def info(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a run folder, or a name.")],
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object.")] = False,
) -> None:
    """Show what a model is: architecture, parameters, memory, tokenizer, recipe, scores, and what it can do.

    Example: clearhead info en-de
    """
    from clearhead.checkpoint import model_folder_info
    from clearhead.predict import find_model

    found = _facts(model, model_folder_info(find_model(model)))
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    lines = {key: value for key, value in _lines(found).items() if value}
    width = max(map(len, lines))
    for key, value in lines.items():
        first, *rest = value.strip().splitlines()
        typer.echo("\n".join([f"{key:{width}}  {first}", *(" " * (width + 2) + line for line in rest)]))


def _facts(name: str, about: "ModelFolderInfo") -> dict[str, Any]:
    """Everything that is known without reading the weights."""
    import torch

    from clearhead.config.model import supported_commands
    from clearhead.model import build
    from clearhead.model.cost import model_cost, parameters_by_part

    config, card = about.config, about.card
    stored = FORMATS.get(about.stored_as, about.stored_as)
    cost = model_cost(config, dtype=torch.float32)
    return {
        "name": name,
        "folder": str(about.folder),
        "summary": card.summary,
        "can": supported_commands(config),
        "family": config.family,
        "architecture": {key: value for key, value in config.model_dump(mode="json").items() if value is not None},
        "parameters": cost.parameters,
        "parts": parameters_by_part(build(config, "meta")),
        "file_bytes": about.weight_bytes,
        "stored_as": stored,
        "memory_bytes": cost.weight_bytes,
        "cache_bytes": cost.cache_bytes,
        "flops_per_token": cost.flops_per_token,
        "tokenizers": [
            {"kind": type(each.engine.model).__name__, "tokens": len(each), "roles": list(each.roles)}
            for each in about.tokenizers
        ],
        "data": list(card.data),
        "scores": [vars(score) for score in card.scores],
        "recipe": card.recipe,
        "license": card.license,
    }


def _lines(found: dict[str, Any]) -> dict[str, str]:
    """The facts for people."""
    shape, parts = found["architecture"], found["parts"]
    layers = " + ".join(str(shape[key]) for key in ("encoder_layers", "decoder_layers") if shape[key])
    longest = max(map(len, parts))
    tokenizers = [
        f"{each['kind']}, {each['tokens']:,} tokens ({', '.join(each['roles'])})" for each in found["tokenizers"]
    ]
    heads = f"{shape['heads']} heads ({shape['kv_heads']} for keys and values)"
    return {
        "name": found["name"],
        "folder": found["folder"],
        "summary": found["summary"],
        "can": ", ".join(found["can"]),
        "family": found["family"],
        "architecture": f"{layers} layers of width {shape['width']:,}, {heads}, "
        f"feed-forward {shape['ff_dim']:,} ({shape['activation']})\n"
        f"{shape['norm']} norm, {shape['norm_position']}; {shape['position']} positions, {shape['max_positions']:,}; "
        f"attention {', '.join(shape['attention'])}",
        "parameters": f"{found['parameters']:,}\n"
        + "\n".join(f"{part:{longest}} {count:>14,}" for part, count in parts.items()),
        "file": f"{memory(found['file_bytes'])}, {found['stored_as']}",
        "memory": f"{memory(found['memory_bytes'])} in float32"
        + (f", and {memory(found['cache_bytes'])} for each row at full context" if found["cache_bytes"] else ""),
        "FLOPs": f"{amount(found['flops_per_token'])} a token",
        "tokenizer": "\n".join(tokenizers),
        "data": "\n".join(found["data"]),
        "scores": "\n".join(map(_score, found["scores"])),
        "recipe": found["recipe"],
        "license": found["license"],
    }


def _score(score: dict[str, Any]) -> str:
    signature = f" ({score['signature']})" if score["signature"] else ""
    return f"{score['metric']} {score['value']:g} on {score['data']}{signature}"


def models(as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False) -> None:
    """List the models that there are: those of the package, those that were pulled, and those of the runs in ./runs.

    Example: clearhead models
    """
    from clearhead.checkpoint.formats.pull import pulled_models
    from clearhead.predict.find import local_models, packaged_models

    places = {"package": packaged_models(), "pulled": pulled_models(), "runs": local_models()}
    rows = [_row(name, folder, place) for place, found in places.items() for name, folder in found.items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if not rows:
        typer.echo("none yet; train one with `clearhead train mini-en-de`, then `clearhead translate runs/mini-en-de`")
        return
    table = [("name", "family", "parameters", "file", "score", "for")]
    for row in rows:
        size = ("", "") if row["problem"] else (amount(row["parameters"]), memory(row["file_bytes"]))
        table.append((row["name"], row["family"], *size, row["score"], row["problem"] or row["for"]))
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    for *cells, last in table:
        typer.echo("  ".join([*(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)), last]).rstrip())


def _row(name: str, folder: Path, place: str) -> dict[str, Any]:
    """One model of the list; a damaged one is in it, too, with what is wrong."""
    from clearhead.checkpoint import model_folder_info
    from clearhead.config.model import supported_commands
    from clearhead.model import build
    from clearhead.model.cost import count_parameters

    row: dict[str, Any] = {"name": name, "folder": str(folder), "place": place, "problem": ""}
    try:
        found = model_folder_info(folder)
    except UserError as error:
        nothing = {"family": "", "parameters": None, "file_bytes": None, "score": "", "for": ""}
        return row | nothing | {"problem": str(error)}
    first = next((f"{score.metric} {score.value:g}" for score in found.card.scores), "")
    data = found.extra.get("data")
    task = str(data.get("task", "")) if isinstance(data, dict) else ""
    return row | {
        "family": found.config.family,
        "parameters": count_parameters(build(found.config, "meta")),
        "file_bytes": found.weight_bytes,
        "score": first,
        "for": found.card.summary.partition("\n")[0] or task or supported_commands(found.config)[0],
    }
