"""Vectors of a batch's images, which replace those of its image tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbeds:
    """Image vectors of a packed batch, and where they go."""

    vectors: Tensor
    """[image tokens, width], in the dtype of the weights: those of all images of the batch, in order."""
    places: Tensor
    """[image tokens], int64, ascending: indices of the image tokens in the batch."""
    places_on_host: NDArray[np.int64]
    """`places` in host memory, readable without waiting for the device."""
    positions: Tensor | None
    """[3, tokens], int64: each token's positions in its sequence. None: positions are counted as in a text."""

    deepstack: Tensor | None = None
    """[layers, image tokens, width]: added to the image tokens' vectors after each of the first layers.

    See Meng et al., 2024, DeepStack, https://arxiv.org/abs/2406.04334. None: nothing is added.
    """

    def between(self, start: int, end: int) -> ImageEmbeds:
        """Select the part for the sequences from token `start` up to token `end`."""
        first, last = np.searchsorted(self.places_on_host, [start, end])
        inside = slice(int(first), int(last))
        positions = None if self.positions is None else self.positions[:, start:end]
        return ImageEmbeds(
            self.vectors[inside],
            self.places[inside] - start,
            self.places_on_host[inside] - start,
            positions,
            None if self.deepstack is None else self.deepstack[:, inside],
        )
