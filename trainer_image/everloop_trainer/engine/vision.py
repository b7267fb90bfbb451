"""The part of a base model that sees. It is frozen and has no adapter, so what it makes of an image is a constant.

Each image goes through it alone: the bits of its features do not depend on the images beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from everloop_trainer.engine.images import Image, ImageReader


@dataclass(frozen=True, slots=True)
class Sight:
    """What the decoder is told of the images of a batch.

    Attributes:
        positions: int64 (3, rows, length): time, row and column of each token.
        offsets: for each row of the batch: what a token behind it has for its position, less its index.
        features: of all images of the batch, row by row.
    """

    positions: torch.Tensor
    offsets: Sequence[int]
    features: BaseModelOutputWithDeepstackFeatures

    def arguments(self) -> dict[str, Any]:
        """As the model takes them."""
        return {"position_ids": self.positions, "mm_encoder_outputs": {"image": self.features}}


class Vision:
    """Sees for one base model: `model` is transformers' Qwen3VLModel, with decoder and vision tower."""

    def __init__(self, model: Any, reader: ImageReader) -> None:
        self._model = model
        self.reader = reader

    @torch.no_grad()
    def see(self, tokens: torch.Tensor, images: Sequence[Sequence[Image]]) -> Sight:
        """Decode the images of a batch and let the model see them.

        Args:
            tokens: int64 (rows, length), padded on the right with text.
            images: of each row; one image in all at least.

        Raises:
            ContentError: a file cannot be decoded.
        """
        found, grids = [], []
        for image in (each for row in images for each in row):
            pixels, grid = self.reader.prepare(image)
            found.append(self._model.get_image_features(pixels, grid))
            grids.append(grid)
        positions, offsets = self._model.get_rope_index(
            tokens,
            mm_token_type_ids=(tokens == self.reader.placeholder).int(),
            image_grid_thw=torch.cat(grids),
        )
        layers = range(len(found[0].deepstack_features))
        features = BaseModelOutputWithDeepstackFeatures(
            pooler_output=[part for each in found for part in each.pooler_output],
            deepstack_features=[[part for each in found for part in each.deepstack_features[n]] for n in layers],
        )
        return Sight(positions, offsets[:, 0].tolist(), features)
