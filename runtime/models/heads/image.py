"""What is made of images: a vector, a vector for each patch, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.kernels.transfer import Later, begin_readback
from staged_pool.runtime.models.specs.model import DenseSpec, LabelsSpec, ModelFolder, OwnVectorSpec, PoolingMode
from staged_pool.runtime.models.transformer.pooling import pool
from staged_pool.runtime.models.vision.image_encoder import ImageFeatures
from staged_pool.runtime.requests import Output
from staged_pool.stages.errors import ConfigError


class ImageHead(Protocol):
    """Makes one output of a model of images. Called on the device's thread, in inference mode."""

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        """What this output is for each image, on the host."""
        ...

    def parameters(self) -> int:
        """How many the head has beside those of the model."""
        ...


class ImageVector:
    """One vector for each image, before the normalisation at the end of the chain.

    Args:
        spec: What makes it.
        sample: What the model makes of some images.
        whole: The checkpoint.

    Raises:
        ConfigError: The model makes no vector of images by itself, or weights of the modules do not fit.
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
    """The last layer's vectors of each image: of its patches, and of what the model puts before them."""

    def parameters(self) -> int:
        return 0

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        assert features.hidden is not None
        vectors, ends = begin_readback(features.hidden), np.cumsum(features.counts)
        # Copies: a row that is kept must not keep those of the whole batch.
        return lambda: [rows.copy() for rows in np.split(vectors(), ends[:-1])]


class ImageLabels:
    """One logit for each label, as the checkpoint's own class makes them."""

    def parameters(self) -> int:
        return 0

    def __call__(self, features: ImageFeatures) -> Later[Sequence[Values]]:
        assert features.own is not None
        logits = begin_readback(features.own)
        return lambda: list(logits())


def build_image_heads(folder: ModelFolder, whole: PreTrainedModel, sample: ImageFeatures) -> dict[Output, ImageHead]:
    """What the folder says is made of images, by what it gives. A model of images alone also gives their patches.

    Args:
        folder: What was read of it.
        whole: Its checkpoint.
        sample: What that makes of some images.

    Raises:
        ConfigError: See `ImageVector`; or there are not as many logits as labels.
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
                raise ConfigError(f"{type(spec).__name__} is nothing that is made of images")
    if Output.DENSE in heads and not folder.heads:
        heads[Output.MULTI_VECTOR] = PatchVectors()
    return heads
