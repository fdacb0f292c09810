"""Hook of mkdocs: links to files of the repository lead to copies on the site, with lines, so that it works offline."""

import posixpath
import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)]*)?\)")
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{path}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}
:root {{ color-scheme: light dark }} body {{ margin: 1rem; font: 14px/1.5 system-ui }}
pre {{ font: 13px/1.5 monospace }}
pre a {{ display: inline-block; width: 3.5em; color: #888; text-decoration: none }}
span:target {{ background: #f5d76e80 }}
@media (prefers-color-scheme: dark) {{ {dark} }}
</style></head><body><h1 style="font-size: 1rem">{path}</h1>{code}</body></html>
"""


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, as a page with numbered lines."""
    wanted = set()
    for file in list(files.documentation_pages()):
        for match in LINK.finditer(file.content_string):
            wanted.add(_repository_path(match[1], file.src_uri))
    for path in sorted(filter(None, wanted)):
        files.append(File.generated(config, f"source/{path}.html", content=_source_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links to the copies."""

    def copy(match: re.Match[str]) -> str:
        path = _repository_path(match[1], page.file.src_uri)
        if path is None:
            return match[0]
        target = posixpath.relpath(f"source/{path}.html", posixpath.dirname(page.file.src_uri) or ".")
        return f"]({target}{match[2] or ''})"

    return LINK.sub(copy, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Mark Chinese pages as Chinese, for fonts and screen readers."""
    if not page.file.src_uri.endswith(".zh-CN.md"):
        return output
    return output.replace('<html lang="en"', '<html lang="zh-CN"').replace("Table of contents", "目录")


def on_post_build(config: Any) -> None:
    """Let the root of the site lead to the first page."""
    page = '<!doctype html><title>Clearhead</title><meta http-equiv="refresh" content="0; url=notes.html">'
    (Path(config.site_dir) / "index.html").write_text(page, encoding="utf-8")


def _source_page(path: str) -> str:
    """Return a file as HTML, each line an element of its own: #L12."""
    text = (ROOT / path).read_text(encoding="utf-8", errors="replace")
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = highlight(text, lexer, HtmlFormatter(nowrap=True)).splitlines()
    rows = [f'<span id="L{n}"><a href="#L{n}">{n}</a>{line}</span>' for n, line in enumerate(lines, 1)]
    style, dark = (HtmlFormatter(style=name).get_style_defs("pre") for name in ("default", "github-dark"))
    return PAGE.format(path=escape(path), style=style, dark=dark, code=f"<pre>{chr(10).join(rows)}</pre>")


def _repository_path(link: str, page: str) -> str | None:
    """Return the path of a linked file from the root of the repository; None within docs/ or if there is no file."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path
