"""A place in S3 below one prefix: the only module that speaks to it. Blocking; for a process of its own.

Credentials are boto3's own chain (environment, web identity, container credentials, instance), or a mounted Secret.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import boto3
import botocore.session
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.credentials import CredentialResolver
from botocore.exceptions import BotoCoreError, ClientError

from everloop_trainer.copies.credentials import MountedProvider

PART_BYTES = 16 << 20
"""Size from which a file is sent in parts, and of a part: 10,000 of them hold 160 GB."""
STREAMS = 4
CONNECT_SECONDS = 10
READ_SECONDS = 60
TRIES = 4
"""How often a single request is sent; whole files are tried again by the caller, for ever."""
SHA256 = "sha256"
URI = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")
FAILURES = (BotoCoreError, Boto3Error, ClientError)


class CopyFailed(Exception):
    """S3 did not do what was asked; the message names operation and object, and holds no secret."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where in S3, and how it is reached. Empty strings leave it to boto3."""

    uri: str
    region: str = ""
    endpoint_url: str = ""
    kms_key_id: str = ""
    credentials_dir: str = ""


class Bucket:
    """Objects below a prefix. `path` is relative to it. Every method raises CopyFailed."""

    def __init__(self, place: Place, below: str) -> None:
        match = URI.fullmatch(place.uri)
        if match is None:
            raise CopyFailed(f"copies.s3.uri: {place.uri!r} is not s3://bucket/prefix")
        self._bucket, prefix = match[1], (match[2] or "").strip("/")
        self._prefix = f"{prefix}/{below}/" if prefix else f"{below}/"
        self._encryption = (
            {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": place.kms_key_id} if place.kms_key_id else {}
        )
        self._client = client(place)
        self._transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=STREAMS
        )

    @property
    def uri(self) -> str:
        """The prefix as an address, for people."""
        return f"s3://{self._bucket}/{self._prefix}"

    def upload(self, source: str, path: str, sha256: str) -> None:
        """A file as an object, in parts if it is large. What a failure leaves of the parts is removed."""
        extra = {**self._encryption, "Metadata": {SHA256: sha256}}
        try:
            self._client.upload_file(source, self._bucket, self._key(path), ExtraArgs=extra, Config=self._transfer)
        except FAILURES as error:
            raise self._failed("PutObject", path, error) from error

    def put(self, path: str, data: bytes) -> None:
        """A small object."""
        self._call("put_object", path, Body=data, **self._encryption)

    def get(self, path: str) -> bytes | None:
        """A small object; None if there is none."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._key(path))
            content: bytes = answer["Body"].read()
        except ClientError as error:
            if _is_absent(error):
                return None
            raise self._failed("GetObject", path, error) from error
        except FAILURES as error:
            raise self._failed("GetObject", path, error) from error
        return content

    def stored(self, path: str) -> tuple[str, int] | None:
        """SHA-256, as it was said at the upload, and size of an object; None if there is none."""
        try:
            answer = self._client.head_object(Bucket=self._bucket, Key=self._key(path))
        except ClientError as error:
            if _is_absent(error):
                return None
            raise self._failed("HeadObject", path, error) from error
        except FAILURES as error:
            raise self._failed("HeadObject", path, error) from error
        return answer.get("Metadata", {}).get(SHA256, ""), int(answer["ContentLength"])

    def download(self, path: str, file: RawIOBase) -> None:
        """An object into a file that is open for writing, in parts if it is large."""
        try:
            self._client.download_fileobj(self._bucket, self._key(path), file, Config=self._transfer)
        except FAILURES as error:
            raise self._failed("GetObject", path, error) from error

    def list(self, below: str = "", after: str = "") -> Iterator[str]:
        """Paths of the objects below a path, in the order of their names, those after `after` only."""
        arguments: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._key(below)}
        if after:
            arguments["StartAfter"] = self._key(after)
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(**arguments):
                for item in page.get("Contents", ()):
                    yield str(item["Key"]).removeprefix(self._prefix)
        except FAILURES as error:
            raise self._failed("ListObjectsV2", below, error) from error

    def delete(self, path: str) -> None:
        """Removes an object; that there is none is no error."""
        self._call("delete_object", path)

    def abort_uploads(self, below: str = "") -> int:
        """Removes the parts of uploads below a path, which nobody will finish; returns of how many."""
        count = 0
        try:
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._key(below)
            )
            for page in pages:
                for upload in page.get("Uploads", ()):
                    self._client.abort_multipart_upload(
                        Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                    )
                    count += 1
        except FAILURES as error:
            raise self._failed("ListMultipartUploads", below, error) from error
        return count

    def _call(self, method: str, path: str, **arguments: Any) -> None:
        try:
            getattr(self._client, method)(Bucket=self._bucket, Key=self._key(path), **arguments)
        except FAILURES as error:
            raise self._failed(method, path, error) from error

    def _key(self, path: str) -> str:
        return self._prefix + path

    def _failed(self, operation: str, path: str, error: Exception) -> CopyFailed:
        return CopyFailed(f"{operation} {self.uri}{path}: {reason(error)}")


_making = threading.Lock()


def client(place: Place) -> Any:
    """An S3 client for a place."""
    with _making:
        core = botocore.session.Session()
        if place.credentials_dir:
            resolver = CredentialResolver([MountedProvider(Path(place.credentials_dir))])
            core.register_component("credential_provider", resolver)
        own = boto3.session.Session(botocore_session=core)
        # Stores that only speak S3's protocol do not all know the newer checksums; every file has a SHA-256 of ours.
        checksums = "when_required" if place.endpoint_url else "when_supported"
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            request_checksum_calculation=checksums,
            response_checksum_validation=checksums,
            s3={"addressing_style": "path"} if place.endpoint_url else {},
        )
        return own.client(
            "s3", region_name=place.region or None, endpoint_url=place.endpoint_url or None, config=config
        )


def _is_absent(error: ClientError) -> bool:
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404 and (
        error.response.get("Error", {}).get("Code") in ("NoSuchKey", "404", "NotFound")
    )


def reason(error: Exception) -> str:
    """What S3, or the way to it, said; no secret."""
    if isinstance(error, Boto3Error) and isinstance(error.__context__, Exception):
        return reason(error.__context__)  # it only adds the names of file and object
    if isinstance(error, ClientError):
        told = error.response.get("Error", {})
        return f"{told.get('Code', '?')}: {told.get('Message', '')}"
    return f"{type(error).__name__}: {error}"
