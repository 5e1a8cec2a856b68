"""What the images of a batch put in the places of its image tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ImageEmbeds:
    """What a packed batch has where its images are."""

    vectors: Tensor
    """[image tokens, width], in the dtype of the weights: of all images of the batch, in order."""
    places: Tensor
    """[image tokens], int64, ascending: the places of the image tokens in the batch."""
    places_on_host: NDArray[np.int64]
    """The same, where the host can read them without waiting for the device."""
    positions: Tensor | None
    """[3, tokens], int64: each token's positions in its sequence. None: the tokens are counted as those of a text."""

    def between(self, start: int, end: int) -> ImageEmbeds:
        """Of the sequences whose tokens are from `start` up to `end` in the batch."""
        first, last = np.searchsorted(self.places_on_host, [start, end])
        inside = slice(int(first), int(last))
        positions = None if self.positions is None else self.positions[:, start:end]
        return ImageEmbeds(
            self.vectors[inside], self.places[inside] - start, self.places_on_host[inside] - start, positions
        )
