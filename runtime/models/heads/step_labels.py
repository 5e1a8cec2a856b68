"""Head for the labels of steps, from the vectors of their tags by linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.models.heads.modules import load_perceptron
from staged_pool.runtime.models.heads.multi_vector import kept_tokens
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.layers import StepLabelsSpec
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.payloads import Values


class StepLabelsHead:
    """Head for logits of each kept token, in float32. Each value is [kept tokens, labels].

    Args:
        spec: See `StepLabelsSpec`.
        token_width: Values of a token vector.
        labels: Number of labels.
        device: Device of the weights.

    Raises:
        ConfigError: Weights of a layer are missing or do not fit.
    """

    def __init__(self, spec: StepLabelsSpec, token_width: int, labels: int, device: torch.device) -> None:
        self._layers = load_perceptron(spec.layers, token_width, labels).to(device)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._layers.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Later[Sequence[Values]]:
        vectors, counts = kept_tokens(hidden, batch)
        logits = begin_readback(self._layers(vectors.float()))
        # Copies: a view in the result cache would keep the logits of the whole batch.
        return lambda: [rows.copy() for rows in np.split(logits(), np.cumsum(counts)[:-1])]
