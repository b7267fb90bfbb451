"""A base model below a prefix of a bucket."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everloop_trainer.copies.bucket import FAILURES, SHA256, URI, Place, client, reason
from everloop_trainer.fetching.files import CHUNK, FetchFailed, SourceFile

_MD5 = re.compile(r'"([0-9a-f]{32})"')


class S3Source:
    """See fetching.files.Source. Raises FetchFailed for an address that is none."""

    def __init__(self, place: Place) -> None:
        match = URI.fullmatch(place.uri)
        if match is None:
            raise FetchFailed(f"s3.uri: {place.uri!r} is not s3://bucket/prefix")
        self.title = place.uri
        self._bucket = match[1]
        prefix = (match[2] or "").strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: Any = client(place)
        self._tags: dict[str, str] = {}

    def files(self) -> tuple[str, Sequence[SourceFile]]:
        """See fetching.files.Source: everything below the prefix but names that begin with a dot."""
        found = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
            for item in (item for page in pages for item in page.get("Contents", ())):
                name = str(item["Key"]).removeprefix(self._prefix)
                if name and not name.endswith("/") and not any(part.startswith(".") for part in name.split("/")):
                    found.append(self._described(name))
        except FAILURES as error:
            raise FetchFailed(f"{self.title}: {reason(error)}") from error
        return "", found

    def _described(self, name: str) -> SourceFile:
        head = self._client.head_object(Bucket=self._bucket, Key=self._prefix + name)
        self._tags[name] = str(head.get("ETag", ""))
        size, told = int(head["ContentLength"]), head.get("Metadata", {}).get(SHA256, "")
        if told:
            return SourceFile(name, size, "sha256", told)
        # The tag of an object that was sent in one part, and not encrypted with a key of one's own, is its MD5.
        digest = _MD5.fullmatch(self._tags[name])
        if digest and head.get("ServerSideEncryption") != "aws:kms":
            return SourceFile(name, size, "md5", digest[1])
        return SourceFile(name, size, "size")

    def fetch(self, file: SourceFile, directory: Path) -> None:
        """See fetching.files.Source: the rest of the object, of the very version that was listed."""
        target = directory / file.name
        have = target.stat().st_size if target.is_file() else 0
        if have >= file.size:
            have = 0  # it is not whole, so it is something else
        try:
            conditions = {"IfMatch": self._tags[file.name], "Range": f"bytes={have}-" if have else ""}
            answer = self._client.get_object(
                Bucket=self._bucket,
                Key=self._prefix + file.name,
                **{name: value for name, value in conditions.items() if value},
            )
            with target.open("ab" if have else "wb") as content:
                for chunk in answer["Body"].iter_chunks(CHUNK):
                    content.write(chunk)
        except FAILURES as error:
            raise FetchFailed(f"{self.title}/{file.name}: {reason(error)}") from error
