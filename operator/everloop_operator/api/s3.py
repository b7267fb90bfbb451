"""A place in S3, or in a store that speaks its protocol."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .schema import CONTROL, ApiModel, OptionalName

S3Uri = Annotated[str, Field(max_length=1024, pattern=rf"^s3://[a-z0-9][a-z0-9.-]{{1,61}}[a-z0-9](/[^/{CONTROL}]+)*$")]
"""`s3://bucket/prefix`."""


class S3Location(ApiModel):
    """Where in S3, and with which credentials."""

    uri: S3Uri = Field(description="`s3://bucket/prefix`.")
    region: Annotated[str, Field(max_length=64)] = Field(
        default="", description="Region of the bucket; empty: as the pod's environment says."
    )
    endpoint_url: Annotated[str, Field(max_length=1024, pattern=r"^(https?://[^/\s]+(/\S*)?)?$")] = Field(
        default="", description="Address of a store that speaks S3's protocol; empty: Amazon S3."
    )
    credentials_secret_name: OptionalName = Field(
        default="",
        description="Secret of this namespace with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for credentials that "
        "expire, AWS_SESSION_TOKEN; read anew for every request. Empty: what the pod's ServiceAccount or node has.",
    )
