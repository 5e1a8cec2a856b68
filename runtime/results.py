"""What a caller gets, and how rows of the device become it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import ModelCard, Row
from staged_pool.stages.work import EmbedRequest


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int
    """Tokens that the model read, special tokens included, after truncation."""


@dataclass(frozen=True, slots=True)
class EmbedResult:
    """One vector for each input, in their order."""

    embeddings: NDArray[np.float32]
    """[inputs, width or the dimensions asked for]."""
    usage: Usage
    model: str
    """The served name."""


def embed_result(request: EmbedRequest, rows: Sequence[Row], tokens: int, card: ModelCard) -> EmbedResult:
    """Cut and normalise pooled rows as the request asks.

    A vector that is cut to fewer dimensions is normalised again (if the model normalises at all), because cosine
    similarity of cut vectors needs it and clients of Matryoshka models expect it.
    """
    vectors = rows[0][np.newaxis] if len(rows) == 1 else np.stack(rows)
    if request.dimensions is not None:
        vectors = vectors[:, : request.dimensions]
    if request.normalize and card.normalize:
        lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors))[:, np.newaxis]
        vectors = vectors / np.maximum(lengths, 1e-12)  # as torch.nn.functional.normalize has it
    return EmbedResult(np.ascontiguousarray(vectors), Usage(tokens), card.name)
