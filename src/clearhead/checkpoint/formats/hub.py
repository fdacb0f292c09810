"""Models of the Hugging Face Hub by name, `hf:organization/name[@revision]`: settings, safetensors and tokenizers."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from clearhead.checkpoint.formats.optional_import import import_optional
from clearhead.errors import UserError

PREFIX = "hf:"
NAME = re.compile(r"hf:(\w[\w.-]{0,95})/(\w[\w.-]{0,95})(?:@(\w[\w./-]{0,99}))?")
# Of the top folder. Pickles and code are never downloaded.
PATTERNS = ("*.json", "model*.safetensors", "*.jinja", "vocab.txt", "merges.txt", "*.spm", "sentencepiece*.model")
POOLING = "1_Pooling/config.json"
# Of other libraries.
SKIPPED = ("onnx*", "openvino*", "tf_model*", "flax_model*", "rust_model*", "coreml*", "training_args*", "trainer_*")
CHECK_INSIDE = re.compile(r"[\w][\w .+-]*(/[\w][\w .+-]*)*/?")
MIB = 1 << 20


class HubName(NamedTuple):
    """A repository of the Hub; revision is a branch, a tag, a commit or refs/pr/N."""

    organization: str
    name: str
    revision: str | None = None

    @property
    def repository(self) -> str:
        """The name on the Hub."""
        return f"{self.organization}/{self.name}"

    @property
    def folder(self) -> str:
        """The name of its folder in the cache."""
        revision = "" if self.revision is None else "@" + self.revision.replace("/", "+")
        return f"hf--{self.organization}--{self.name}{revision}"

    def __str__(self) -> str:
        return f"{PREFIX}{self.repository}" + ("" if self.revision is None else f"@{self.revision}")


def parse_name(name: str) -> HubName | None:
    """Return the repository and revision of `hf:organization/name[@revision]`; None for another name."""
    match = NAME.fullmatch(name)
    if match is None or ".." in (match[3] or ""):
        return None
    return HubName(match[1], match[2], match[3])


def name_of_folder(folder: str) -> str:
    """Return the name of a model by its folder in the cache."""
    repository, at, revision = folder.partition("@")
    return re.sub(r"^hf--([^-].*?)--", r"hf:\1/", repository) + at + revision.replace("+", "/")


def fetch(name: HubName, folder: Path, report: Callable[[str], None]) -> str:
    """Download a repository at the commit that its revision is now, and return that commit."""
    hub = import_optional("huggingface_hub")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        info = hub.HfApi(endpoint=endpoint).model_info(name.repository, revision=name.revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        names = [file for file in sizes if _is_needed(file)]
        for file in names:
            check_inside(file, str(name))
        if not any(file.endswith(".safetensors") for file in names):
            raise UserError(
                f"{name} has no weights in safetensors; other formats may run code when they are read. Use a revision "
                "that has them, like @refs/pr/1 of a conversion, or another repository"
            )
        size = sum(sizes[file] for file in names)
        report(f"{name} at commit {info.sha}: {len(names)} files, {size / MIB:,.0f} MiB")
        hub.snapshot_download(
            name.repository, revision=info.sha, allow_patterns=names, local_dir=folder, endpoint=endpoint
        )
        return str(info.sha)
    except UserError:
        raise
    except Exception as error:  # of the hub library, its HTTP library or the system
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"{name} could not be fetched ({type(error).__name__}: {reason:.200}); it needs a network and a "
            "public repository; a folder that you already have can be converted with `clearhead import`"
        ) from None


def check_inside(name: str, source: str) -> None:
    """Refuse the name of a fetched file that is not below the folder that it is written to."""
    if not CHECK_INSIDE.fullmatch(name):
        raise UserError(
            f"{source}: the file name {name!r:.80} is not allowed, as it may lead out of the model's folder"
        )


def is_hidden(name: str) -> bool:
    """Whether a file is like .gitattributes, which no model needs."""
    return any(part.startswith(".") and part.strip(".") for part in name.split("/"))


def _is_needed(name: str) -> bool:
    if is_hidden(name):
        return False
    if not CHECK_INSIDE.fullmatch(name):  # refused later, if it is one of ours
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS)
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in SKIPPED):
        return False
    return name == POOLING or ("/" not in name and any(fnmatch.fnmatchcase(name, pattern) for pattern in PATTERNS))
