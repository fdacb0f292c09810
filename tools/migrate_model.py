"""Rewrite a model folder of an older format version in the current one, with bit-identical tensors.

python -m tools.migrate_model models/mine
"""

import argparse
import re
from pathlib import Path

from torch import Tensor

from clearhead.checkpoint import disk
from clearhead.checkpoint.model_folder import (
    CARD,
    FORMAT,
    VERSION,
    format_version,
    read_settings,
    save_weights,
    weight_files,
    write_tokenizers,
)
from clearhead.checkpoint.tensors import read_tensors
from clearhead.checkpoint.version1 import migrate_name
from clearhead.files import read_text


def migrate(folder: Path) -> None:
    """Rename settings and tensors; int8 tensors and their scales keep their values."""
    names = disk.verify(folder)
    config, tokenizers, extra = read_settings(folder, names)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder, names):
        tensors |= {name: tensor.clone() for name, tensor in read_tensors(folder / file).items()}
    if format_version(folder) == 1:
        tensors = {migrate_name(name): tensor for name, tensor in tensors.items()}
    card = read_text(folder / CARD) if (folder / CARD).exists() else ""
    with disk.atomic_folder(folder) as temporary:
        settings = {"format": FORMAT, "version": VERSION, "model": config.model_dump(mode="json")}
        disk.write_json(temporary / "config.json", settings | extra)
        write_tokenizers(temporary, [tokenizer.engine for tokenizer in tokenizers])
        if card:
            disk.write_text(temporary / CARD, re.sub(r"^## Licence$", "## License", card, flags=re.M))
        save_weights(temporary, tensors)


def main() -> None:
    """Parse the command line and migrate."""
    parser = argparse.ArgumentParser(prog="python -m tools.migrate_model", description=__doc__.split("\n")[0])
    parser.add_argument("folders", type=Path, nargs="+", help="model folders")
    for folder in parser.parse_args().folders:
        migrate(folder)
        print(f"{folder}: format version {VERSION}")


if __name__ == "__main__":
    main()
