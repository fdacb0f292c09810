"""Hook of mkdocs: links to files of the repository lead to copies on the site, so that it is complete offline."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs/ that a page links to, as text."""
    wanted = set()
    for file in list(files.documentation_pages()):
        for match in LINK.finditer(file.content_string):
            wanted.add(_repository_path(match[1], file.src_uri))
    for path in sorted(filter(None, wanted)):
        files.append(File.generated(config, f"source/{path}.txt", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links to the copies."""

    def copy(match: re.Match[str]) -> str:
        path = _repository_path(match[1], page.file.src_uri)
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(f'source/{path}.txt', posixpath.dirname(page.file.src_uri) or '.')})"

    return LINK.sub(copy, markdown)


def _repository_path(link: str, page: str) -> str | None:
    """Return the path of a linked file from the root of the repository; None within docs/ or if there is no file."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path
