"""`clearhead presets`: list architectures with parameter counts, memory and FLOPs."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.language import localized
from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config import ModelConfig
    from clearhead.model.cost import Cost


def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Preset name, or YAML file with model settings.")
    ] = None,
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to override.")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 24, help="Context length for cache and FLOPs. Default: max_positions."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Data type of weights and cache: fp32, bf16, fp16 or fp64.")] = "fp32",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List presets, or show one, with exact parameter counts, memory and FLOPs per token.

    Example: clearhead presets
    Example: clearhead presets llama3-8b kv_heads=32 --context 4096 --dtype bf16
    """
    from clearhead.config import preset, preset_names
    from clearhead.config.dtypes import FLOAT_DTYPES, parse_dtype

    dtype = parse_dtype(dtype, FLOAT_DTYPES, "--dtype")
    if name is None:
        configs = {preset_name: preset(preset_name) for preset_name in preset_names()}
    else:
        configs = {name: preset(name, changes or ())}
        limit = configs[name].max_positions
        if context is not None and context > limit:
            raise UserError(f"--context: {context:,} is more than {name}'s max_positions {limit:,}; lower it")
    rows = [_row(preset_name, config, context, dtype) for preset_name, config in configs.items()]
    if as_json:
        echo_json(rows, indent=2)
    else:
        _print_table(rows)
        if name is not None:
            _print_settings(configs[name])


def _row(name: str, config: "ModelConfig", context: int | None, dtype: str) -> dict[str, Any]:
    import torch

    from clearhead.config.dtypes import DTYPES
    from clearhead.model.cost import model_cost

    cost: Cost = model_cost(config, context, getattr(torch, DTYPES[dtype]))
    return {
        "name": name,
        "family": config.family,
        "parameters": cost.parameters,
        "weight_bytes": cost.weight_bytes,
        "training_bytes": cost.training_bytes,
        "cache_bytes": cost.cache_bytes,
        "flops_per_token": cost.flops_per_token,
        "context": min(context or config.max_positions, config.max_positions),
        "dtype": dtype,
    }


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.cli.console import Console

    console = Console()
    console.width = max(console.width, 80)  # never truncate a number
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold", max_width=18)
    for title in ("parameters", "weights", "training", "context", "cache", "FLOPs"):
        table.add_column(title, justify="right", no_wrap=True)
    family = ""
    for row in sorted(rows, key=lambda row: (row["family"], row["parameters"])):
        if row["family"] != family:
            family = row["family"]
            table.add_row(Text(family, style="bold"))
        table.add_row(
            f" {row['name']}",
            f"{row['parameters']:,}",
            format_bytes(row["weight_bytes"]),
            format_bytes(row["training_bytes"]),
            f"{row['context']:,}",
            format_bytes(row["cache_bytes"]) if row["cache_bytes"] else "–",
            format_count(row["flops_per_token"]),
        )
    console.print(table)
    notes = (
        f"\nweights, cache  in {rows[0]['dtype']}; KV cache of one sequence at that context"
        "\ntraining        weights, gradients and Adam moments in fp32, without activations"
        "\nFLOPs           forward pass of the last token of the context; a multiply-add is 2"
    )
    console.print(localized(notes), style="dim")


def _print_settings(config: "ModelConfig") -> None:
    """Print a config as YAML."""
    settings = {key: value for key, value in config.model_dump(mode="json").items() if value is not None}
    echo("\n" + "\n".join(f"{key}: {_to_yaml(value)}" for key, value in settings.items()))


def _to_yaml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def format_bytes(count: float) -> str:
    """Format a number of bytes: 1.2 GB."""
    return f"{format_count(count)}B"


def format_count(count: float) -> str:
    """Format a large number in powers of a thousand: 124.4 M."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 or not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.0f} E"
