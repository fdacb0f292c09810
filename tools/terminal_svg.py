"""Render the output of a command as an SVG image, for the README.

    export FORCE_COLOR=1 COLUMNS=100
    clearhead demo 2>/dev/null | python -m tools.terminal_svg docs/demo.svg --title "make demo"

Colors are those of the input; lines longer than the width are wrapped, never clipped.
"""

import argparse
import html
import io
import re
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

# The reader's own fonts, none from the network: one for Latin text, then those of Linux, macOS and Windows for Chinese
FONTS = (
    "'DejaVu Sans Mono', Menlo, Consolas, 'Noto Sans Mono CJK SC', 'Noto Sans CJK SC', 'PingFang SC', "
    "'Microsoft YaHei', monospace"
)
BLACK, WHITE, BRIGHT = (22, 27, 34), (230, 237, 243), (255, 255, 255)
CELL = 12.2  # rich's width of a character
RED, GREEN, YELLOW, BLUE = (255, 123, 114), (87, 211, 100), (227, 179, 65), (121, 192, 255)
MAGENTA, CYAN, GRAY = (188, 140, 255), (86, 212, 221), (125, 133, 144)
THEME = TerminalTheme(
    BLACK,
    WHITE,
    [BLACK, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, WHITE],
    [GRAY, RED, GREEN, YELLOW, BLUE, MAGENTA, CYAN, BRIGHT],
)


def main() -> None:
    """Read standard input and write the image."""
    parser = argparse.ArgumentParser(prog="python -m tools.terminal_svg", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--title", default="clearhead")
    parser.add_argument("--width", type=int, default=100)
    options = parser.parse_args()
    options.out.write_text(render(sys.stdin.read(), options.title, options.width), encoding="utf-8")


def render(output: str, title: str, width: int) -> str:
    """Return the SVG of a command's output, with its ANSI colors."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in output.strip("\n").splitlines():
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title=title, theme=THEME)
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.S)
    svg = svg.replace("font-family: Fira Code, monospace", f"font-family: {FONTS}")
    svg = re.sub(r'textLength="[^"]*"([^>]*>)([^<]*)', _text_length, svg)
    return svg.replace("<svg ", '<svg xml:space="preserve" ', 1)


def _text_length(match: re.Match[str]) -> str:
    """The width of a text by its cells, as Chinese characters are two cells wide; rich counts characters."""
    return f'textLength="{CELL * cell_len(html.unescape(match[2])):g}"{match[1]}{match[2]}'


if __name__ == "__main__":
    main()
