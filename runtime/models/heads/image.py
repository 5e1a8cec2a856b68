"""Heads on image features: a vector, a vector for each patch, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.model import DenseSpec, LabelsSpec, ModelFolder, OwnVectorSpec, PoolingMode
from staged_pool.runtime.models.transformer.pooling import pool
from staged_pool.runtime.models.vision.image_encoder import ImageFeatures
from staged_pool.runtime.payloads import Values
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError


class ImageHead(Protocol):
    """Head that computes one output of images. Called on a device thread, in inference mode."""

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        """Start to compute the output.

        Returns:
            A function that waits for the output and returns its value for each image, on the host.
        """
        ...

    def parameters(self) -> int:
        """Return the number of weights of the head, without those of the model."""
        ...


class ImageVector:
    """Head for one vector of each image, without the final normalization.

    Args:
        spec: Pooling and modules, or modules behind the checkpoint's own vector.
        sample: Features of test images.
        whole: The checkpoint.

    Raises:
        ConfigError: The model makes no vector of an image by itself, or weights of the modules do not fit.
    """

    width: int
    """Values of one vector."""

    def __init__(self, spec: DenseSpec | OwnVectorSpec, sample: ImageFeatures, whole: PreTrainedModel) -> None:
        self._pooling: Sequence[PoolingMode] = ()
        if isinstance(spec, DenseSpec):
            self._pooling = [mode for mode in spec.pooling if mode != "end"]
        elif sample.own is None:
            raise ConfigError(f"{type(whole).__name__}: its vision model has no head that makes one vector of an image")
        modules, width = build_modules(spec.modules, self._pooled(sample).shape[1], whole)
        self._modules = modules.to(whole.device)
        self.width = min(width, spec.truncate_dim or width)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._modules.parameters())

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        rows = begin_readback(self._modules(self._pooled(features))[:, : self.width])
        return lambda: list(rows())

    def _pooled(self, features: ImageFeatures) -> Tensor:
        if not self._pooling:
            assert features.own is not None
            return features.own.float()
        assert features.hidden is not None
        return pool(features.hidden, features.lengths, self._pooling)


class PatchVectors:
    """Head for the last layer's vectors of each image: its patches, and the model's extra tokens."""

    def parameters(self) -> int:
        return 0

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        assert features.hidden is not None
        vectors, ends = begin_readback(features.hidden), np.cumsum(features.counts)
        # Copies: a view in the result cache would keep the vectors of the whole batch.
        return lambda: [rows.copy() for rows in np.split(vectors(), ends[:-1])]


class ImageLabels:
    """Head for one logit of each label, as the checkpoint's class computes them."""

    def parameters(self) -> int:
        return 0

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        assert features.own is not None
        logits = begin_readback(features.own)
        return lambda: list(logits())


def build_image_heads(folder: ModelFolder, whole: PreTrainedModel, sample: ImageFeatures) -> dict[Output, ImageHead]:
    """Build the heads on image features, by output. A model without texts also gives patch vectors.

    Args:
        folder: Settings read from the folder.
        whole: Its checkpoint.
        sample: Features of test images.

    Raises:
        ConfigError: See `ImageVector`; or the number of logits is not that of the labels.
    """
    heads: dict[Output, ImageHead] = {}
    for spec in folder.image_heads:
        match spec:
            case DenseSpec() | OwnVectorSpec():
                heads[Output.DENSE] = ImageVector(spec, sample, whole)
            case LabelsSpec():
                if sample.own is None or sample.own.shape[1] != len(folder.labels):
                    raise ConfigError(f"{type(whole).__name__} does not give {len(folder.labels)} logits for an image")
                heads[Output.LABELS] = ImageLabels()
            case _:
                raise ConfigError(f"{type(spec).__name__} cannot be computed from images")
    if Output.DENSE in heads and not folder.heads:
        heads[Output.MULTI_VECTOR] = PatchVectors()
    return heads
