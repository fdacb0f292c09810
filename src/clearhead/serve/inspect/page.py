"""The page: static files from the package, under a strict content security policy."""

from __future__ import annotations

import gzip
import hashlib
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.requests import Request

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asks again with the ETag, so that an upgrade shows at once
}
MIN_GZIP_BYTES = 1000


def page_files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by path, with their types."""
    found: dict[str, tuple[bytes, str]] = {}

    def walk(folder: Any, prefix: str) -> None:
        for entry in sorted(folder.iterdir(), key=lambda each: each.name):
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
            elif (suffix := "." + entry.name.rpartition(".")[2]) in TYPES:
                found[prefix + entry.name] = (entry.read_bytes(), TYPES[suffix])

    walk(files("clearhead.serve").joinpath("page"), "")
    return found


def mount_page(app: FastAPI) -> None:
    """Serve the page at / and its files under /page; `app.state.page_files` may get further views."""
    app.state.page_files = page_files()

    def answer(request: Request, path: str) -> Response:
        found = app.state.page_files.get(path)
        if found is None:
            message = "there is no such file of the page; open /"
            error = {"message": message, "type": "not_found_error", "param": None, "code": None}
            return JSONResponse({"error": error}, 404)
        data, kind = found
        tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**HEADERS, "ETag": tag})
        headers = {**HEADERS, "ETag": tag, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("accept-encoding", "") and len(data) > MIN_GZIP_BYTES:
            data, headers["Content-Encoding"] = gzip.compress(data, mtime=0), "gzip"
        return Response(data, media_type=kind, headers=headers)

    @app.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return answer(request, "index.html")

    @app.get("/page/{path:path}", include_in_schema=False)
    async def file(request: Request, path: str) -> Response:
        return answer(request, path)
