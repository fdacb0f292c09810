"""A picture of what a command prints, for the README.

    clearhead demo | python -m tools.picture docs/demo.svg --title "make demo"

Lines of progress are left out, as they would stand one after the other; fonts are those of the reader.
"""

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

HEADING = re.compile(r"\d · |Next")
PROGRESS = re.compile(r"step [\d,]+/[\d,]+ ·")


def main() -> None:
    """Read standard input, write the picture."""
    parser = argparse.ArgumentParser(prog="python -m tools.picture", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="clearhead")
    parser.add_argument("--width", type=int, default=110)
    options = parser.parse_args()
    console = Console(record=True, width=options.width, file=io.StringIO())
    for line in sys.stdin.read().splitlines():
        if not PROGRESS.match(line):
            console.print(Text(line, style="bold" if HEADING.match(line) else ""), no_wrap=line.startswith("step"))
    picture = console.export_svg(title=options.title)
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.S)  # nothing is fetched when it is looked at
    options.out.write_text(picture.replace("Fira Code", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
