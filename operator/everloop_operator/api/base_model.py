"""The base model of a TrainingSession, and where its files come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .schema import ApiModel, ObjectName, RelativePath


class ModelClaim(ApiModel):
    """A directory on a PersistentVolumeClaim that holds a Hugging Face model (config.json and safetensors files)."""

    claim_name: ObjectName = Field(description="Name of the PersistentVolumeClaim, in the namespace of this object.")
    path: RelativePath = Field(default="", description="Directory of the model on the claim, relative to its root.")


class ModelSource(ApiModel):
    """Where the files of the base model come from."""

    claim: ModelClaim = Field(description="A PersistentVolumeClaim that already holds the files; mounted read-only.")


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
