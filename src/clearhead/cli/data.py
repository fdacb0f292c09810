"""`clearhead data`: list the public datasets of the recipes, and download one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.cli.output import echo, echo_json
from clearhead.errors import UserError

if TYPE_CHECKING:
    from clearhead.data.public_datasets import OnBytes, PublicDataset, PublicFile


def data(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Dataset to download. Default: list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the public datasets that recipes use, or download one to CLEARHEAD_DATA or ./data.

    Example: clearhead data
    Example: clearhead data tinyshakespeare
    """
    from clearhead.config.settings import nearest
    from clearhead.data.public_datasets import public_datasets

    datasets = public_datasets()
    if name is None:
        _list(datasets, as_json)
    elif name not in datasets:
        raise UserError(f"data: no dataset {name!r:.60}{nearest(name, list(datasets))}")
    else:
        _download(name, datasets[name])


def _list(datasets: "dict[str, PublicDataset]", as_json: bool) -> None:
    from clearhead.cli.presets import format_bytes

    if as_json:
        rows = [
            {
                "name": name,
                **each.model_dump(mode="json", exclude={"files"}),
                "bytes": sum(file.size for file in each.files),
                "files": [file.model_dump() | {"present": _find(file) is not None} for file in each.files],
            }
            for name, each in datasets.items()
        ]
        echo_json(rows, indent=2)
        return
    width = max(map(len, datasets))
    for name, each in datasets.items():
        found = sum(_find(file) is not None for file in each.files)
        state = "present" if found == len(each.files) else f"{found}/{len(each.files)}" if found else "-"
        size = format_bytes(sum(file.size for file in each.files))
        echo(f"{name:{width}}  {state:7}  {size:>7}  {each.summary}")
        files = each.files[0].path if len(each.files) == 1 else f"{each.files[0].path} and {len(each.files) - 1} more"
        echo(f"{'':{width}}  {files}; {each.license}; {each.source}")


def _find(file: "PublicFile") -> Path | None:
    """Return where recipes find a file."""
    from clearhead.data.corpus_files import find_file

    try:
        return find_file(file.path)
    except UserError:
        return None


def _download(name: str, dataset: "PublicDataset") -> None:
    """Download what is missing; files that cannot be downloaded are named, with the place where they belong."""
    from clearhead.data.public_datasets import DownloadError, NoConnection, download, download_folder, is_intact

    missing: list[PublicFile] = []
    problem, connected = "", True
    for file in dataset.files:
        target = download_folder() / file.path
        if found := _find(file):
            known = "present" if is_intact(found, file) else "present, but not the version of the published results"
            echo(f"{found}: {known}", err=True)
            continue
        if not file.url or not connected:
            missing.append(file)
            continue
        try:
            with _progress(file) as on_bytes:
                download(file, target, on_bytes)
            echo(f"{target}: downloaded, SHA-256 verified", err=True)
        except DownloadError as error:
            missing.append(file)
            problem, connected = problem or str(error), not isinstance(error, NoConnection)
    if missing:
        raise UserError(_by_hand(name, dataset, missing, problem))


def _by_hand(name: str, dataset: "PublicDataset", missing: "list[PublicFile]", problem: str) -> str:
    from clearhead.data.public_datasets import download_folder

    why = problem or "there is no address for an automatic download"
    what, them = ("this file", "it") if len(missing) == 1 else (f"these {len(missing)} files", "them")
    lines = [
        f"{name}: {why}; download {what} from {dataset.source} and put {them} here (gzip or plain text both work):"
    ]
    lines += [f"  {download_folder() / file.path} ({file.size:,} bytes, SHA-256 {file.sha256})" for file in missing]
    return "\n".join(lines)


@contextmanager
def _progress(file: "PublicFile") -> "Iterator[OnBytes]":
    """Show a progress bar on a terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from clearhead.cli.console import Console

    console = Console(err=True)
    if not console.is_terminal:
        yield lambda count: None
        return
    with Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console) as bar:
        task = bar.add_task(file.path, total=file.size)
        yield lambda count: bar.advance(task, count)
