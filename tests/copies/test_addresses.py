"""Addresses in S3: what the API takes is what the request asks for, whatever bucket and prefix are called."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pydantic import TypeAdapter, ValidationError

from everloop_operator.api.s3 import S3Uri
from everloop_trainer.copies.bucket import Bucket, Place, client

ADDRESS: TypeAdapter[str] = TypeAdapter(S3Uri)
PREFIXES = ["", "models", "models/small", "odd !'()*+,;=@&$", "a?b#c", "50%25", "../up", "m\u00f6del", "~tilde/.dot"]


@pytest.mark.parametrize("bucket", ["bucket", "team.example.com", "123-abc"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_bucket_and_key_are_what_the_address_says(tmp_path: Path, bucket: str, prefix: str) -> None:
    """Without an endpoint a bucket may be part of the host: none with dots, which TLS would refuse."""
    for field, value in (("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "secret")):
        (tmp_path / field).write_text(value)
    uri = ADDRESS.validate_python("/".join(filter(None, (f"s3://{bucket}", prefix))))
    for endpoint in ("", "https://s3.example.com"):
        place = Place(uri, "us-west-2", endpoint, credentials_dir=str(tmp_path))
        assert Bucket(place, "lineage").uri == "/".join(filter(None, (f"s3://{bucket}", prefix, "lineage/")))
        key = f"{prefix or 'top'}/file"
        signed = client(place).generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
        url = urlsplit(signed)
        in_host = url.netloc.startswith(f"{bucket}.s3.")
        assert unquote(url.path) == (f"/{key}" if in_host else f"/{bucket}/{key}")
        assert not (in_host and ("." in bucket or endpoint))


@pytest.mark.parametrize("uri", ["bucket/x", "s3://B/x", "s3://b", "s3://bucket//x", "s3://bucket/x/", "s3://-bucket"])
def test_what_is_no_address_is_refused(uri: str) -> None:
    """At admission, by the pattern of the field."""
    with pytest.raises(ValidationError):
        ADDRESS.validate_python(uri)
