"""Head for a score from the last token's vector, by linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.heads.modules import load_layers
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.layers import LayersScoreSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.transformer.pooling import last_token_pool
from staged_pool.stages.errors import ConfigError


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
        layers = load_layers(spec.layers, token_width)
        if (width := layers[-1].out_features) != 1:
            raise ConfigError(f"{spec.layers[-1].weight} gives {width} values; a score is one")
        between = [module for layer in layers for module in (layer, nn.ReLU())]
        self._layers = nn.Sequential(*between[:-1]).to(device)
        self._offset = spec.offset

    def parameters(self) -> int:
        return sum(p.numel() for p in self._layers.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        scores = self._layers(last_token_pool(hidden, batch.lengths).float()) + self._offset
        read = begin_readback(scores)
        return lambda: list(read())
