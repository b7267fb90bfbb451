"""A base model on the Hugging Face hub, or on a mirror that HF_ENDPOINT names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from everloop_trainer.fetching.files import FetchFailed, SourceFile

WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
UNWANTED = ("onnx/*", "original/*", "*.bin.index.json", "training_args*")
"""Other formats of the same weights."""


class HubSource:
    """See fetching.files.Source. `token` is empty for public models."""

    def __init__(self, repo: str, revision: str, token: str) -> None:
        self.title = f"{repo} at {revision}"
        self._repo, self._revision = repo, revision
        self._token: str | bool = token or False
        self._commit = ""

    def files(self) -> tuple[str, Sequence[SourceFile]]:
        """See fetching.files.Source: weights as safetensors, configuration and tokenizer, of one commit."""
        try:
            info = HfApi(token=self._token).model_info(self._repo, revision=self._revision, files_metadata=True)
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise FetchFailed(f"{self.title}: {_reason(error)}") from error
        self._commit = info.sha or self._revision
        found = []
        for item in info.siblings or ():
            name, size = item.rfilename, item.size or 0
            wanted = any(fnmatch.fnmatch(name, pattern) for pattern in WANTED)
            if not wanted or any(fnmatch.fnmatch(name, pattern) for pattern in UNWANTED) or name.startswith("."):
                continue
            if item.lfs is not None:
                found.append(SourceFile(name, item.lfs.size, "sha256", item.lfs.sha256))
            elif item.blob_id:
                found.append(SourceFile(name, size, "git", item.blob_id))
            else:
                found.append(SourceFile(name, size, "size"))
        return self._commit, found

    def fetch(self, file: SourceFile, directory: Path) -> None:
        """See fetching.files.Source: the hub's own client goes on from what it has kept below `.cache`."""
        try:
            hf_hub_download(
                self._repo,
                file.name,
                revision=self._commit,
                local_dir=directory,
                token=self._token,
                force_download=False,
            )
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise FetchFailed(f"{self.title}: {file.name}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first line: the others tell how to log in from a notebook."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
