"""Full and read-only disks: one line names the file and the reason, and the previous version is intact."""

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clearhead.checkpoint import disk, load_model, newest_checkpoint, run_lock, save_model, write_checkpoint
from clearhead.errors import UserError
from tests.checkpoint.small_models import contents, network, tokenizer
from tests.checkpoint.test_crash import in_child

PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 400 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={100 * PAGE}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def save(run: Path, step: int) -> None:
    write_checkpoint(run, step, {"weight": torch.ones(2 * PAGE)}, {"moment": torch.ones(PAGE)}, {}, keep=2)


def test_a_full_disk_is_reported_and_the_previous_checkpoint_is_intact(small_disk: Path) -> None:
    """Save with every amount of free space from none to enough, so that each file in turn does not fit."""
    save(small_disk, 1)
    before, failed, pages = contents(small_disk), set(), 0
    filler = small_disk / "filler"
    while True:
        filler.unlink(missing_ok=True)
        status = os.statvfs(small_disk)
        filler.write_bytes(b"x" * PAGE * (status.f_bavail - pages))
        try:
            save(small_disk, 2)
            break
        except UserError as error:
            message = str(error)
        folder, _, reason = message.partition(" cannot be written ")
        assert reason.startswith("(No space left on device); the previous version is intact;")
        assert "\n" not in reason
        assert folder.startswith(str(small_disk / "checkpoints" / "step-00000002"))
        failed.add(Path(folder).name)
        filler.unlink()
        assert contents(small_disk) == before
        assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000001"]
        pages += 1
    assert {"weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} <= failed
    assert newest_checkpoint(small_disk)[0].step == 2  # type: ignore[union-attr]


def test_a_full_disk_leaves_the_previous_model(small_disk: Path) -> None:
    save_model(small_disk / "best", network(), tokenizer(), {"seed": 0})
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * PAGE * (os.statvfs(small_disk).f_bavail - 4))
    with pytest.raises(UserError, match=r"best/\w+.\w+ cannot be written \(No space left on device\)"):
        save_model(small_disk / "best", network(1), tokenizer(), {"seed": 1})
    assert load_model(small_disk / "best").extra == {"seed": 0}
    assert {path.name for path in small_disk.iterdir()} == {"best", "filler"}


def test_a_read_only_disk_is_reported(small_disk: Path) -> None:
    save(small_disk, 1)
    save_model(small_disk / "best", network(), tokenizer())
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"step-00000002 cannot be written \(Read-only file system\)"):
        save(small_disk, 2)
    with pytest.raises(UserError, match=r"best cannot be written \(Read-only file system\)"):
        save_model(small_disk / "best", network(), tokenizer())
    with (
        pytest.raises(UserError, match=r"\.lock cannot be written \(Read-only file system\)"),
        run_lock(small_disk / "x"),
    ):
        pass
    assert newest_checkpoint(small_disk)[0].step == 1  # type: ignore[union-attr]
    load_model(small_disk / "best")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"run cannot be written \(Permission denied\)"):
        save(tmp_path / "run", 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_weights_without_read_permission_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "best", network(), tokenizer())
    (tmp_path / "best" / "model.safetensors").chmod(0)
    for verify in (True, False):
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read \(Permission denied\)"):
            load_model(tmp_path / "best", verify=verify)


@pytest.mark.parametrize(("limit", "name"), [(1000, "weights.safetensors"), (10 * PAGE, "optimizer.safetensors")])
def test_a_file_beyond_the_size_limit_is_named(limit: int, name: str, tmp_path: Path) -> None:
    """RLIMIT_FSIZE, which needs no root."""
    save(tmp_path, 1)

    def save_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(UserError, match=rf"{name} cannot be written \(File too large\)"):
            write_checkpoint(tmp_path, 2, {"a": torch.ones(PAGE)}, {"b": torch.ones(4 * PAGE)}, {}, keep=2)

    assert in_child(save_limited) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_failed_rename_restores_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path / "best", network(), tokenizer(), {"seed": 0})
    before, replace = contents(tmp_path), os.replace

    def fail(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"best cannot be written \(Input/output error\)"):
        save_model(tmp_path / "best", network(1), tokenizer(), {"seed": 1})
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_failed_sync_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(
        UserError, match=r"step-00000001/optimizer\.safetensors cannot be written \(Input/output error\)"
    ):
        save(tmp_path, 1)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_an_error_without_errno_keeps_its_message(tmp_path: Path) -> None:
    """numpy raises an OSError without errno when the disk is full."""
    message = r"cannot be written \(6 requested and 3 written\)"
    with pytest.raises(UserError, match=message), disk.atomic_folder(tmp_path / "folder"):
        raise OSError("6 requested and 3 written")
