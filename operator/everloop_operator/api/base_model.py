"""The base model of a TrainingSession, and where its files come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from .s3 import S3Location, S3Uri
from .schema import ApiModel, ObjectName, OptionalName, RelativePath, rules


class ModelClaim(ApiModel):
    """A directory on a PersistentVolumeClaim that holds a Hugging Face model (config.json and safetensors files)."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim, in the namespace of this object.")
    path: RelativePath = Field(default="", description="Directory of the model on the claim, relative to its root.")


class HuggingFaceModel(ApiModel):
    """A model on the Hugging Face hub, or on the mirror that HF_ENDPOINT in spec.pod.env names."""

    repo: Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$")] = (
        Field(description="Its name there, `organisation/model`.")
    )
    revision: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] = Field(
        default="main",
        description="Commit, tag or branch; what a branch is at its first fetch stays in the cache under its name.",
    )
    token_secret_name: OptionalName = Field(
        default="", description="Secret of this namespace whose key `token` opens a gated or private model."
    )


class S3Model(S3Location):
    """A model in S3: the directory of a Hugging Face model below a prefix."""

    uri: S3Uri = Field(description="`s3://bucket/prefix` of the directory.")


class ModelSource(ApiModel):
    """Where the files of the base model come from: a claim that has them, the hub, or S3."""

    claim: ModelClaim | None = Field(
        default=None, description="A PersistentVolumeClaim that already holds the files; mounted read-only."
    )
    hugging_face: HuggingFaceModel | None = Field(
        default=None, description="The Hugging Face hub; fetched into spec.storage.modelCache."
    )
    s3: S3Model | None = Field(default=None, description="S3; fetched into spec.storage.modelCache.")

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "[has(self.claim), has(self.huggingFace), has(self.s3)].filter(x, x).size() == 1",
                "exactly one of claim, huggingFace and s3 must be set",
            ),
        )
    )


class BaseModelSpec(ApiModel):
    """The frozen model that adapters are trained on."""

    name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        description="Name by which clients ask for this model, for instance `Qwen/Qwen3-8B`."
    )
    revision: Annotated[str, Field(max_length=128)] = Field(
        default="",
        description="Revision of the files, recorded in storage; storage written for another revision is refused.",
    )
    source: ModelSource = Field(description="Where the files come from.")
