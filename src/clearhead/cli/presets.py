"""`clearhead presets`: the architectures that come with the package, and what each one costs."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.config import ModelConfig
    from clearhead.model.cost import Cost

DTYPES = ("float32", "bfloat16", "float16")


def presets(
    name: Annotated[str | None, typer.Argument(help="A preset, or a YAML file with model settings.")] = None,
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to change.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, max=1 << 24, help="Tokens of context for cache and FLOPs (default: all).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Number format of weights and cache: float32, bfloat16, float16.")] = (
        "float32"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="For programs: a list of objects.")] = False,
) -> None:
    """Show architectures: exact parameter count, memory, FLOPs per token.

    Example: clearhead presets
    Example: clearhead presets llama3-8b kv_heads=32 --context 4096 --dtype bfloat16
    """
    from clearhead.config import preset, preset_names
    from clearhead.config.settings import nearest

    if dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not allowed{nearest(dtype, list(DTYPES))}")
    if name is None:
        configs = {each: preset(each) for each in preset_names()}
    else:
        configs = {name: preset(name, changes or ())}
        longest = configs[name].max_positions
        if context is not None and context > longest:
            raise UserError(f"--context: {context:,} is more than {name}'s max_positions {longest:,}; use at most that")
    rows = [_row(each, config, context, dtype) for each, config in configs.items()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _show(rows, None if name is None else configs[name])


def _row(name: str, config: "ModelConfig", context: int | None, dtype: str) -> dict[str, Any]:
    import torch

    from clearhead.model.cost import model_cost

    cost: Cost = model_cost(config, context, getattr(torch, dtype))
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


def _show(rows: list[dict[str, Any]], one: "ModelConfig | None") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    console.width = max(console.width, 80)  # piped or in a narrow window: rather a long line than a cut number
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", overflow="fold", max_width=18)
    for title in ("parameters", "weights", "training", "context", "cache", "FLOPs"):
        table.add_column(title, justify="right", no_wrap=True)
    family = ""
    for row in sorted(rows, key=lambda row: (row["family"], row["parameters"])):
        if row["family"] != family:
            family = row["family"]
            table.add_row(f"[bold]{family}[/bold]")
        table.add_row(
            f" {escape(row['name'])}",
            f"{row['parameters']:,}",
            memory(row["weight_bytes"]),
            memory(row["training_bytes"]),
            f"{row['context']:,}",
            memory(row["cache_bytes"]) if row["cache_bytes"] else "–",
            amount(row["flops_per_token"]),
        )
    console.print(table)
    console.print(
        f"\nweights, cache  in {rows[0]['dtype']}; the cache of one row at that context"
        "\ntraining        weights, gradients, Adam's moments in fp32, no activations"
        "\nFLOPs           forward, last token of the context; a multiply-add is two",
        style="dim",
    )
    if one is not None:
        settings = {key: value for key, value in one.model_dump(mode="json").items() if value is not None}
        text = "\n".join(f"{key}: {_plain(value)}" for key, value in settings.items())
        console.print("\n" + text, markup=False, soft_wrap=True)


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | bool) else str(value)


def memory(count: float) -> str:
    """Bytes for people: 1.2 GB."""
    return f"{amount(count)}B"


def amount(count: float) -> str:
    """A large number for people, in powers of a thousand: 124.4 M."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.0f} {unit}" if count >= 100 or not unit else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.0f} E"
