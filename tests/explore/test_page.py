"""The files of the page: messages in both languages, size, security headers, and that nothing is fetched elsewhere."""

import gzip
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import clearhead.serve
from clearhead.serve.inspect.page import mount_page, page_files

PAGE = Path(clearhead.serve.__file__).parent / "page"
SCRIPTS = sorted(PAGE.rglob("*.js"))
MESSAGES = {language: json.loads((PAGE / f"messages/{language}.json").read_text("utf-8")) for language in ("en", "zh")}
CHECKERS = Path(__file__).parents[2] / "tools" / "page"  # tsc and eslint, from npm
PLACEHOLDER = re.compile(r"\{(\w+)\}")


def test_both_languages_have_the_same_messages_and_placeholders() -> None:
    english, chinese = MESSAGES["en"], MESSAGES["zh"]
    assert english.keys() == chinese.keys()
    assert list(english) == sorted(english)
    for key, text in english.items():
        assert text.strip(), key
        assert chinese[key].strip(), key
        assert set(PLACEHOLDER.findall(text)) == set(PLACEHOLDER.findall(chinese[key])), key


def test_messages_that_the_scripts_name_exist() -> None:
    own = [path for path in SCRIPTS if path.parent.name != "vendor"]
    named = {key for path in own for key in re.findall(r'\bt\("([\w.-]+)"', path.read_text("utf-8"))}
    assert named
    assert named <= MESSAGES["en"].keys(), named - MESSAGES["en"].keys()
    # and those that are put together: t(`view.${name}`)
    for path in own:
        for start in re.findall(r"\bt\(`([\w.]+\.)\$\{", path.read_text("utf-8")):
            assert any(key.startswith(start) for key in MESSAGES["en"]), (path.name, start)


def test_the_scripts_are_small(client: TestClient) -> None:
    """What a browser loads for the first view as it is written, and for all views as it is sent."""
    later = [path for path in SCRIPTS if path.parent.name == "views" and path.stem != "attention"]
    first = sum(path.stat().st_size for path in SCRIPTS if path not in later)
    sent = sum(len(gzip.compress(path.read_bytes())) for path in SCRIPTS)
    assert first <= 110_000, f"{first:,} bytes of script for the first view"
    assert sent <= 80_000, f"{sent:,} bytes of compressed script"
    assert client.get("/page/app.js", headers={"Accept-Encoding": "gzip"}).headers["content-encoding"] == "gzip"


def test_the_page_asks_no_other_host_and_has_no_inline_script() -> None:
    for path in [*SCRIPTS, PAGE / "style.css", PAGE / "index.html"]:
        if path.parent.name == "vendor" or path.name == "export.js":  # the export writes a file of its own
            continue
        text = path.read_text("utf-8")
        foreign = [url for url in re.findall(r"https?://[^\s\"'`)]+", text) if "www.w3.org" not in url]
        assert foreign == [], path.name
    index = (PAGE / "index.html").read_text("utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)", index) == []
    assert re.findall(r"\son\w+=|style=", index) == []


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    mount_page(app)
    return TestClient(app)


def test_files_come_with_a_strict_policy(client: TestClient) -> None:
    for path in ("/", "/page/app.js", "/page/style.css", "/page/messages/zh.json", "/page/views/attention.js"):
        answer = client.get(path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/vendor/README.md"]
)
def test_nothing_but_the_page_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert "b'" not in answer.text


def test_every_import_names_a_file_of_the_page() -> None:
    files = page_files()
    for path in SCRIPTS:
        for name in re.findall(r"(?:from|import)\s*\(?\s*[\"'](\.[^\"']+)[\"']", path.read_text("utf-8")):
            target = (path.parent / name).resolve().relative_to(PAGE)
            assert str(target) in files, f"{path.name}: {name}"


def test_every_library_has_its_license() -> None:
    licenses = "".join(path.read_text("utf-8") for path in (PAGE / "vendor").glob("LICENSE.*"))
    for path in (PAGE / "vendor").glob("*.js"):
        assert path.name in licenses


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(PAGE)))
def test_scripts_parse_as_modules(path: Path) -> None:
    command = ["node", "--input-type=module", "--check"]
    result = subprocess.run(command, input=path.read_bytes(), capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()


@pytest.mark.skipif(not (CHECKERS / "node_modules").is_dir(), reason="run `npm install` in tools/page first")
def test_types_and_style_of_the_scripts_are_right() -> None:
    command = ["npm", "run", "--silent", "check"]
    result = subprocess.run(command, cwd=CHECKERS, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
