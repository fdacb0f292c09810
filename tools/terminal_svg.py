"""Render the output of a command as an SVG image, for the README.

    clearhead demo | python -m tools.terminal_svg docs/demo.svg --title "make demo"

Progress lines are left out; the image uses the fonts of the reader's browser.
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
    """Read standard input and write the image."""
    parser = argparse.ArgumentParser(prog="python -m tools.terminal_svg", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="clearhead")
    parser.add_argument("--width", type=int, default=110)
    options = parser.parse_args()
    console = Console(record=True, width=options.width, file=io.StringIO())
    for line in sys.stdin.read().splitlines():
        if not PROGRESS.match(line):
            console.print(Text(line, style="bold" if HEADING.match(line) else ""), no_wrap=line.startswith("step"))
    svg = console.export_svg(title=options.title)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S)  # no fonts are fetched from the network
    options.out.write_text(svg.replace("Fira Code", "monospace"), encoding="utf-8")


if __name__ == "__main__":
    main()
