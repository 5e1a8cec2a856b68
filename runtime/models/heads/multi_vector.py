"""Head for one vector of each token, or of each chunk of tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback, send_arrays
from staged_pool.runtime.models.specs.model import MultiVectorSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import mean_pool
from staged_pool.runtime.payloads import Values


class MultiVectorHead:
    """Head for one vector of each token or chunk, without the final normalization.

    Each value is [tokens kept, width], or [chunks, width] of a sequence in chunks. A chunk has the mean of its token
    vectors, which goes through the modules then: behind an activation, the mean would be another one.

    Args:
        spec: See `MultiVectorSpec`.
        token_width: Values of a token vector.
        device: Device of the weights.
        own_layer: Layer of the checkpoint that token vectors go through first, in any dtype. None: there is none.

    Raises:
        ConfigError: Weights of the modules are missing or do not fit.
    """

    width: int
    """Values of one vector."""

    def __init__(
        self, spec: MultiVectorSpec, token_width: int, device: torch.device, own_layer: nn.Linear | None = None
    ) -> None:
        modules, self.width = build_modules(spec.modules, token_width if own_layer is None else own_layer.out_features)
        if own_layer is not None:
            modules = nn.Sequential(copy.deepcopy(own_layer).float(), *modules)
        self._modules = modules.to(device)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._modules.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        kept, counts = kept_tokens(hidden, batch)
        rows = kept.float()
        if any(sequence.chunks is not None for sequence in batch.sequences):
            each = [sequence.chunks or (1,) * count for sequence, count in zip(batch.sequences, counts, strict=True)]
            # A token of another sequence is a run of its own, whose mean is exact.
            rows = mean_pool(rows, send_arrays([np.array(own, np.int64) for own in each], hidden.device))
            counts = list(map(len, each))
        vectors = begin_readback(self._modules(rows))
        # Copies: a view in the result cache would keep the vectors of the whole batch.
        return lambda: [own.copy() for own in np.split(vectors(), np.cumsum(counts)[:-1])]


def kept_tokens(hidden: Tensor, batch: PackedBatch) -> tuple[Tensor, list[int]]:
    """Return the vectors of kept tokens, and their number in each sequence.

    Args:
        hidden: [tokens, width].
        batch: The sequences; see `TokenSequence.kept`.
    """
    kept, counts = _kept(batch)
    return (hidden if kept is None else hidden[send_arrays([kept], hidden.device)]), counts


def _kept(batch: PackedBatch) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]] | None, list[int]]:
    """Return the indices of the kept tokens in the batch (None: all), and their number in each sequence."""
    sequences = batch.sequences
    counts = [len(s.ids) if s.kept is None else len(s.kept) for s in sequences]
    if all(s.kept is None for s in sequences):
        return None, counts
    places = np.empty(sum(counts), np.int64)
    start = end = 0
    for sequence, count in zip(sequences, counts, strict=True):
        kept = range(len(sequence.ids)) if sequence.kept is None else sequence.kept
        places[end : end + count] = kept
        places[end : end + count] += start
        start += len(sequence.ids)
        end += count
    return places, counts
