"""Token embeddings of packed batches, whose rows are longer than a model's position table.

A packed batch is one row of many sequences. CLIP's text model rejects a row longer than its position table, whatever
`position_ids` it gets.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class PackedEmbeddings(nn.Module):
    """Token embeddings plus position embeddings, for rows of any length.

    Args:
        token_embedding: One vector for each token of the vocabulary.
        position_embedding: One vector for each position of a sequence.
    """

    def __init__(self, token_embedding: nn.Embedding, position_embedding: nn.Embedding) -> None:
        super().__init__()
        # The names of the replaced module's children: transformers looks them up.
        self.token_embedding = token_embedding
        self.position_embedding = position_embedding

    def forward(self, *, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[rows, tokens] each -> [rows, tokens, width]."""
        vectors: Tensor = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        return vectors


def use_packed_embeddings(model: nn.Module) -> Callable[[], None]:
    """Replace each module of a model that only adds token and position embeddings.

    The caller checks that the results stay equal: only the names and types of the children are known.

    Returns:
        A function that puts the original modules back.
    """
    places = [
        (parent, name, child, embeddings)
        for parent in model.modules()
        for name, child in parent.named_children()
        if (embeddings := _packed(child)) is not None
    ]
    for parent, name, _, embeddings in places:
        setattr(parent, name, embeddings)

    def restore() -> None:
        for parent, name, child, _ in places:
            setattr(parent, name, child)

    return restore


def _packed(module: nn.Module) -> PackedEmbeddings | None:
    match dict(module.named_children()):
        case {"token_embedding": nn.Embedding() as tokens, "position_embedding": nn.Embedding() as positions, **more}:
            return None if more else PackedEmbeddings(tokens, positions)
    return None
