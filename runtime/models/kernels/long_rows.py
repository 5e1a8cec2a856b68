"""Rows of tokens that are longer than a model's table of positions, as those of packed batches are.

The text model of CLIP refuses them, whatever positions it is given. Packed it takes half to two thirds of the time, for
captions of 8 to 24 tokens (CLIP of base size, one core): less is computed, in one call instead of several a layer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class RowEmbeddings(nn.Module):
    """Vectors of tokens, plus those of their positions.

    Args:
        token_embedding: Of the vocabulary.
        position_embedding: Of the positions of one sequence.
    """

    def __init__(self, token_embedding: nn.Embedding, position_embedding: nn.Embedding) -> None:
        super().__init__()
        # By the names of those that it takes the place of: transformers looks for them.
        self.token_embedding = token_embedding
        self.position_embedding = position_embedding

    def forward(self, *, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[rows, tokens] each -> [rows, tokens, width]."""
        vectors: Tensor = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        return vectors


def take_long_rows(model: nn.Module) -> Callable[[], None]:
    """Put `RowEmbeddings` in the place of each module of a model that seems to be no more than that.

    Returns:
        Puts the original modules back.
    """
    places = [
        (parent, name, child, rows)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (rows := _rows(child)) is not None
    ]
    for parent, name, _, rows in places:
        setattr(parent, name, rows)

    def restore() -> None:
        for parent, name, child, _ in places:
            setattr(parent, name, child)

    return restore


def _rows(module: nn.Module) -> RowEmbeddings | None:
    match dict(module.named_children()):
        case {"token_embedding": nn.Embedding() as tokens, "position_embedding": nn.Embedding() as positions, **more}:
            return None if more else RowEmbeddings(tokens, positions)
    return None
