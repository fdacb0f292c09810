"""Rich output, for tables, colors and progress bars: its texts are data, without markup and control characters."""

import sys
from collections.abc import Iterable
from typing import TextIO, cast

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from clearhead.cli.output import CheckedStream, escape


class Console(rich.console.Console):
    """A console on stdout, stderr or another stream; on a terminal, control characters in texts are escaped."""

    def __init__(self, *, err: bool = False, file: TextIO | None = None):
        stream = sys.stderr if err else sys.stdout
        if file is None and stream is not None:
            file = cast(TextIO, CheckedStream(stream, err))
        super().__init__(file=file, stderr=err, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments: control codes of rich itself, and texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control or not self.is_terminal else segment._replace(text=escape(segment.text))
