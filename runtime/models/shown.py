"""What the pictures of a batch put in the places of its image tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """What a packed batch has where its pictures are."""

    vectors: Tensor
    """[image tokens, width], in the dtype of the weights: of all pictures of the batch, in order."""
    places: Tensor
    """[image tokens], int64, ascending: the places of the image tokens in the batch."""
    positions: Tensor | None
    """[3, tokens], int64: each token's positions in its sequence. None: the tokens are counted as those of a text."""

    def between(self, start: int, end: int) -> Shown:
        """Of the sequences whose tokens are from `start` up to `end` in the batch."""
        inside = (self.places >= start) & (self.places < end)
        positions = None if self.positions is None else self.positions[:, start:end]
        return Shown(self.vectors[inside], self.places[inside] - start, positions)
