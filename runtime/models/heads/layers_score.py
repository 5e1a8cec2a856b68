"""Head for a score from the last token's vector, by linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staged_pool.runtime.models.heads.modules import load_perceptron
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.layers import LayersScoreSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import last_token_pool
from staged_pool.runtime.payloads import Values


class LayersScoreHead:
    """Head for one score of each sequence, in float32. Each value is [1].

    Args:
        spec: See `LayersScoreSpec`.
        token_width: Values of a token vector.
        device: Device of the weights.

    Raises:
        ConfigError: Weights of a layer are missing or do not fit.
    """

    def __init__(self, spec: LayersScoreSpec, token_width: int, device: torch.device) -> None:
        self._layers = load_perceptron(spec.layers, token_width, 1).to(device)
        self._offset = spec.offset

    def parameters(self) -> int:
        return sum(p.numel() for p in self._layers.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        scores = self._layers(last_token_pool(hidden, batch.lengths).float()) + self._offset
        read = begin_readback(scores)
        return lambda: list(read())
