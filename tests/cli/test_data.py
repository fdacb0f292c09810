"""`clearhead data`: the list, downloads that are checked and written whole, what to do by hand without a network."""

import gzip
import hashlib
import io
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from clearhead import cli
from clearhead.cli import data as command
from clearhead.config.recipe import load_recipe, recipe_names
from clearhead.data import public_datasets
from clearhead.data.corpus_files import find_file
from clearhead.data.public_datasets import PublicDataset
from clearhead.errors import UserError

TEXT = b"the cat sat on the mat\n" * 100
SHA256 = hashlib.sha256(TEXT).hexdigest()
HAND = {"path": "toy/hand.txt", "size": len(TEXT), "sha256": SHA256}
PLAIN = {"path": "toy/a.txt.gz", "size": len(TEXT), "sha256": SHA256, "url": "https://example.org/a.txt"}
ZIPPED = PLAIN | {"path": "toy/b.txt", "url": "https://example.org/b.txt.gz"}

Run = Callable[..., tuple[int, str, str]]


class Response(io.BytesIO):
    """What `urlopen` returns."""

    def __init__(self, content: bytes, url: str):
        super().__init__(content)
        self.url = url

    def geturl(self) -> str:
        return self.url


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The content of a small internet, by address; opening any other address fails."""
    found: dict[str, bytes] = {"https://example.org/a.txt": TEXT, "https://example.org/b.txt.gz": gzip.compress(TEXT)}

    def urlopen(request: urllib.request.Request, timeout: float) -> Response:
        if request.full_url not in found:
            raise urllib.error.URLError("no route to host")
        return Response(found[request.full_url], request.full_url)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return found


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLEARHEAD_DATA", raising=False)

    def call(*files: dict[str, object], arguments: tuple[str, ...] = ("toy",)) -> tuple[int, str, str]:
        toy = {"summary": "Toys", "license": "CC0", "source": "https://example.org", "files": list(files)}
        monkeypatch.setattr(public_datasets, "public_datasets", lambda: {"toy": PublicDataset.build(toy)})
        monkeypatch.setattr(sys, "argv", ["clearhead", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = capsys.readouterr()
        return int(ended.value.code or 0), output, errors

    return call


def test_files_are_downloaded_unpacked_checked_and_found(pages: dict[str, bytes], run: Run) -> None:
    code, output, errors = run(PLAIN, ZIPPED)
    assert (code, output) == (0, "")
    assert errors.splitlines() == [
        "data/toy/a.txt.gz: downloaded, SHA-256 verified",
        "data/toy/b.txt: downloaded, SHA-256 verified",
    ]
    assert gzip.decompress(find_file("toy/a.txt.gz").read_bytes()) == TEXT
    assert find_file("toy/b.txt").read_bytes() == TEXT
    pages.clear()
    assert run(PLAIN, ZIPPED)[2].splitlines() == ["data/toy/a.txt.gz: present", "data/toy/b.txt: present"]
    Path("data/toy/b.txt").write_bytes(b"mine\n")
    code, _, errors = run(ZIPPED)
    assert (code, errors) == (0, "data/toy/b.txt: present, but not the version of the published results\n")
    assert Path("data/toy/b.txt").read_bytes() == b"mine\n"


def test_downloads_go_where_recipes_look(
    pages: dict[str, bytes], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del pages["https://example.org/b.txt.gz"]
    toy = {"summary": "Toys", "license": "CC0", "source": "https://example.org", "files": [PLAIN]}
    file = PublicDataset.build(toy).files[0]
    monkeypatch.setenv("CLEARHEAD_DATA", str(tmp_path / "elsewhere"))
    public_datasets.download(file, public_datasets.download_folder() / file.path)
    assert find_file("toy/a.txt.gz") == tmp_path / "elsewhere" / "toy" / "a.txt.gz"


def test_without_a_network_it_says_what_to_put_where(pages: dict[str, bytes], run: Run) -> None:
    pages.clear()
    code, output, errors = run(PLAIN, ZIPPED, HAND)
    assert (code, output) == (2, "")
    first, *rest = errors.splitlines()
    assert first == (
        "clearhead: toy: https://example.org/a.txt cannot be reached (<urlopen error no route to host>); download "
        "these 3 files from https://example.org and put them here (gzip or plain text both work):"
    )
    assert rest == [
        f"clearhead:   data/toy/{name} ({len(TEXT):,} bytes, SHA-256 {SHA256})"
        for name in ("a.txt.gz", "b.txt", "hand.txt")
    ]
    assert not Path("data").exists()


def test_files_without_an_address_are_left_to_the_user(pages: dict[str, bytes], run: Run) -> None:
    code, _, errors = run(PLAIN, HAND)
    assert code == 2
    lines = errors.splitlines()
    assert lines[0] == "data/toy/a.txt.gz: downloaded, SHA-256 verified"
    assert lines[1].startswith("clearhead: toy: there is no address for an automatic download; download this file from")
    assert lines[2].startswith("clearhead:   data/toy/hand.txt (")
    Path("data/toy/hand.txt").write_bytes(gzip.compress(TEXT))
    assert run(PLAIN, HAND)[0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT + b"x", "has changed: its SHA-256 is"),
        (b"<html>404</html>", "has changed: its SHA-256 is"),
        (gzip.compress(TEXT)[:-60], "has changed: its SHA-256 is"),
        (b"\x1f\x8b" + TEXT, "the gzip data is damaged"),
        (b"x" * (len(TEXT) + (1 << 16) + 1), "is larger than 2,300 bytes"),
        (gzip.compress(b"x" * (1 << 26)), "has changed: its SHA-256 is"),  # 64 MiB from 64 KiB are not unpacked
    ],
    ids=["changed", "error page", "cut", "damaged", "too large", "bomb"],
)
def test_what_is_not_the_file_is_refused_and_not_written(
    content: bytes, message: str, pages: dict[str, bytes], run: Run
) -> None:
    pages["https://example.org/a.txt"] = content
    code, _, errors = run(PLAIN)
    assert code == 2
    assert message in errors
    assert not Path("data").exists()


def test_only_https_is_followed(pages: dict[str, bytes], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, errors = run(PLAIN | {"url": "http://example.org/a.txt"})
    assert (code, "http://example.org/a.txt is not https" in errors) == (2, True)
    monkeypatch.setattr(urllib.request, "urlopen", lambda request, timeout: Response(TEXT, "http://elsewhere.org"))
    code, _, errors = run(PLAIN)
    assert (code, "http://elsewhere.org is not https" in errors) == (2, True)


def test_a_misspelled_name_gets_the_nearest(run: Run) -> None:
    assert run(PLAIN, arguments=("tos",))[2] == "clearhead: data: no dataset 'tos'; did you mean toy?\n"


def test_the_list_says_what_is_present(pages: dict[str, bytes], run: Run) -> None:
    run(PLAIN, HAND)
    output = run(PLAIN, HAND, arguments=())[1]
    assert output.startswith("toy  1/2       4.6 kB  Toys\n     toy/a.txt.gz and 1 more; CC0; https://example.org")
    (row,) = json.loads(run(PLAIN, HAND, arguments=("--json",))[1])
    assert (row["name"], row["bytes"], [file["present"] for file in row["files"]]) == ("toy", 4600, [True, False])


def test_every_file_of_a_recipe_is_known_and_has_a_source() -> None:
    known = {file.path for each in public_datasets.public_datasets().values() for file in each.files}
    names = {name for recipe in recipe_names() for corpus in load_recipe(recipe).data.train for name in corpus.files}
    assert len(names) > 10
    assert {name for name in names if name not in known and name not in public_datasets.public_datasets()} == set()


def test_the_table_is_well_formed() -> None:
    for each in public_datasets.public_datasets().values():
        assert each.license
        assert each.source.startswith("https://")
        for file in each.files:
            assert re.fullmatch(r"[0-9a-f]{64}", file.sha256)
            assert re.fullmatch(r"|https://raw\.githubusercontent\.com/\S+", file.url)
            assert not Path(file.path).is_absolute()
            assert ".." not in file.path


def test_a_missing_file_of_a_known_dataset_names_the_command(run: Run) -> None:
    with pytest.raises(
        UserError, match=r"^sst2/train\.tsv\.gz does not exist; run: clearhead data sst2, or set CLEARHEAD_DATA"
    ):
        find_file("sst2/train.tsv.gz")


def test_a_terminal_shows_a_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    toy = {"summary": "Toys", "license": "CC0", "source": "https://example.org", "files": [PLAIN]}
    with command._progress(PublicDataset.build(toy).files[0]) as on_bytes:
        on_bytes(len(TEXT))
    assert "toy/a.txt.gz" in capsys.readouterr().err
