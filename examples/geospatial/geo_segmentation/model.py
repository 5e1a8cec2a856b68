"""Vision transformer that gives a class to each pixel of a tile.

Its weights are random: it shows the way of a request through the stages, and knows nothing of satellite images.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from geo_segmentation.request import BANDS
from geo_segmentation.tiles import EDGE

PATCH: Final = 16
WIDTH: Final = 96
LAYERS: Final = 3
HEADS: Final = 4
CLASSES: Final = 4
SEED: Final = 20_260

TOKENS: Final = (EDGE // PATCH) ** 2
"""Patches of one tile."""


class SegmentationModel(nn.Module):
    """Patches in, logits of the classes of each pixel out: from its own bands, and from the patches around it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(len(BANDS), WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(torch.empty(TOKENS, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES * PATCH**2)
        self.to_pixels = nn.PixelShuffle(PATCH)
        self.bands = nn.Conv2d(len(BANDS), CLASSES, 1)

    def forward(self, tiles: Tensor) -> Tensor:
        """Segment tiles.

        Args:
            tiles: Normalised bands, [tiles, bands, EDGE, EDGE].

        Returns:
            Logits, [tiles, CLASSES, EDGE, EDGE].
        """
        features = self.patches(tiles)
        tokens = self.layers(features.flatten(2).transpose(1, 2) + self.positions)
        around = self.head(tokens).transpose(1, 2).reshape(len(tiles), -1, *features.shape[2:])
        logits: Tensor = self.bands(tiles) + self.to_pixels(around)
        return logits


def build_model(device: str) -> SegmentationModel:
    """Make the model. Its weights are the same on every machine, and no global random state is read or changed."""
    with torch.device("meta"):
        model = SegmentationModel()
    model.to_empty(device="cpu")
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # a bias, or the scale of a norm
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                scale = 0.25 if name.startswith("head") else 1.0  # the pixel itself counts most
                parameter.normal_(0.0, scale * parameter[0].numel() ** -0.5, generator=random)
    return model.to(device).eval().requires_grad_(False)
