"""A Hugging Face Hub on this machine: repositories are folders, and every request is recorded."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Handler(BaseHTTPRequestHandler):
    """Answer /api/models/ORG/NAME/revision/REV, …/tree/COMMIT and /ORG/NAME/resolve/COMMIT/FILE."""

    server: Any

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        path = self.path.partition("?")[0].strip("/").replace("%2F", "/")
        self.server.requests.append(f"{self.command} /{path}")
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        folder, commits = self.server.repositories.get(repository, (None, {}))
        if folder is None:
            return self.reply(404, b'{"error": "Repository not found"}', {"X-Error-Code": "RepoNotFound"}, with_body)
        if api:
            revision = "/".join(parts[5:]) or "main"
            commit = commits.get(revision, revision if revision in commits.values() else None)
            if commit is None:
                return self.reply(404, b'{"error": "Invalid rev"}', {"X-Error-Code": "RevisionNotFound"}, with_body)
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            siblings = [
                {"rfilename": path.relative_to(folder).as_posix(), "size": path.stat().st_size} for path in files
            ]
            if parts[4:5] == ["tree"]:
                tree = [{"type": "file", "path": each["rfilename"], "size": each["size"], "oid": "0" * 40}
                        for each in siblings]  # fmt: skip
                return self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, with_body)
            about = {"id": repository, "modelId": repository, "sha": commit, "siblings": siblings, "tags": []}
            return self.reply(200, json.dumps(about).encode(), {"Content-Type": "application/json"}, with_body)
        commit, file = parts[3], folder / "/".join(parts[4:])
        if not file.is_file():
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        return self.reply(200, content, {"ETag": etag, "X-Repo-Commit": commit}, with_body)

    def reply(self, code: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(code)
        for key, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def fake_hub(
    repositories: dict[str, tuple[Path, dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[str]]:
    """Serve folders as repositories, each with the commits of its revisions; give the list of requests."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.requests = repositories, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    try:
        yield server.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
