"""Image encoder: the part of a model that computes vectors of images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.models.kernels.linear import prepack_linears
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference, keep_if_equal
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.transformer.cuda_graphs import Recorder
from staged_pool.runtime.models.transformer.fused import fuse_layers, fusible_layers
from staged_pool.runtime.models.vision.image_graphs import ImageGraphs, ImageValues
from staged_pool.runtime.models.vision.patches import flatten_patches
from staged_pool.runtime.payloads import Pixels


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Vectors of a batch of images, one image after the other, without padding."""

    hidden: Tensor | None
    """[tokens, width], in the dtype of the weights. None: the model computes labels."""
    lengths: Tensor
    """[images], int64, on the device: the number of vectors of each image."""
    counts: Sequence[int]
    """The same numbers on the host."""
    own: Tensor | None
    """[images, width]: the vector or logits of each image from the model's own class. None: it computes neither."""


class ImageEncoder:
    """The part of a model that reads images. Thread-safe.

    Args:
        whole: The whole model, in eval mode. Its `get_image_features` is called; without one, the model itself.
        image: The transformer in it that reads images.
        scale: Scale of the reader that prepares the images.
    """

    image: PreTrainedModel

    def __init__(self, whole: PreTrainedModel, image: PreTrainedModel, scale: Scale) -> None:
        self.image = image
        self._forward: Callable[..., Any] = getattr(whole, "get_image_features", whole)
        self._scale = scale
        self._shapes_apart = False
        self.graphs: ImageGraphs | None = None
        """Recorded forwards. None: none are recorded."""
        self._any_shape = "spatial_shapes" in inspect.signature(image.forward).parameters

    @property
    def any_shape(self) -> bool:
        """True: images of any shape come as lists of patches."""
        return self._any_shape

    @property
    def pads(self) -> bool:
        """True: images of different shapes are padded to the largest one in a batch."""
        return self._any_shape and not self._shapes_apart

    def encode(self, images: Sequence[Pixels]) -> ImageFeatures:
        """Compute the vectors of images.

        Args:
            images: All of one height and width, unless they come as patches.

        Raises:
            ValueError: The model does not take their size.
        """
        if not self._any_shape:
            pixels = to_device(images, self._scale, self.image.device, self.image.dtype)
            values = None if self.graphs is None else self.graphs.values(pixels)
            return _features(self._values(pixels) if values is None else values, len(images))
        if self._shapes_apart and len({image.grid for image in images}) > 1:
            return _joined([self.encode([image]) for image in images])
        return self._padded(images)

    @property
    def recorded(self) -> Sequence[int]:
        """Numbers of images that have a recorded forward; see `record`."""
        return () if self.graphs is None else self.graphs.counts

    def record(self, recorder: Recorder[ImageValues], sample: Pixels, counts: Sequence[int]) -> str | None:
        """Record forwards of images of one shape, and replay them for batches that fit.

        A number of images that fails is left out, and the others stay.

        Args:
            recorder: See `Recorder`.
            sample: An image of the shape.
            counts: Numbers of images.

        Returns:
            The reason why the first number that failed is left out. None: all are recorded, or images differ in shape.
        """
        if self._any_shape:
            return None
        graphs = ImageGraphs(self._values, recorder)
        reasons = []
        for count in sorted(counts, reverse=True):  # the large ones first: the others use their memory again
            probes = [_noise(sample, seed) for seed in range(2)]

            def change(count: int = count) -> Callable[[], None]:
                graphs.record(to_device([sample] * count, self._scale, self.image.device, self.image.dtype))
                self.graphs = graphs
                return partial(setattr, self, "graphs", None)

            def compute(probes: Sequence[Pixels] = probes, count: int = count) -> Tensor:
                # Cloned: the next replay overwrites the output of this one. Two batches: data that the first one leaves
                # behind would spoil the second.
                return torch.cat([_comparable(self.encode([probe] * max(1, count - 1))).clone() for probe in probes])

            self.graphs = None
            name = f"{type(self.image).__name__}, recorded for {count} images,"
            if reason := keep_if_equal(change, compute, name=name, dtype=self.image.dtype):
                graphs.forget(count)
                reasons.append(reason)
        self.graphs = graphs if graphs.counts else None
        return reasons[0] if reasons else None

    def vector_count(self, image: Pixels) -> int:
        """Return the number of vectors that the transformer computes for an image."""
        if self._any_shape:
            return len(image.values)
        pixels = to_device([image], self._scale, self.image.device, self.image.dtype)
        hidden: Tensor = self.image(pixel_values=pixels).last_hidden_state
        return hidden.shape[1] if hidden.dim() == 3 else hidden[0, 0].numel()  # the latter in convolutional models

    def check_padding(self, images: Sequence[Pixels]) -> str | None:
        """Check that padding does not change the vectors of images of different shapes.

        If it does, images of different shapes run one by one from then on.

        Returns:
            A description of the difference. None: padding changes nothing.
        """
        if not self._any_shape:
            return None
        with torch.inference_mode():
            alone = _comparable(_joined([self.encode([image]) for image in images]))
            apart = difference(_comparable(self.encode(images)), alone)
        if not apart > TOLERANCE[self.image.dtype]:  # the warm-up reports NaN
            return None
        self._shapes_apart = True
        return f"{type(self.image).__name__} gives other vectors beside padding (relative difference {apart:.2g})"

    def fuse(self, images: Sequence[Pixels]) -> str | None:
        """Fuse the layers of known structure, if the results stay equal.

        Args:
            images: Inputs for the comparison.

        Returns:
            The reason why not. None: it is done, or there are no such layers.
        """
        places = fusible_layers(self.image)
        return self._change(partial(fuse_layers, places), images) if places else None

    def prepack(self, images: Sequence[Pixels]) -> str | None:
        """Multiply patches instead of convolving them, and prepack linear layers, if the results stay equal.

        Args:
            images: Inputs for the comparison.

        Returns:
            The reason why not. None: it is done.
        """

        def change() -> Callable[[], None]:
            restores = ExitStack()
            restores.callback(flatten_patches(self.image))
            restores.callback(prepack_linears(self.image))
            return restores.close

        return self._change(change, images)

    def _values(self, pixels: Tensor, **others: Tensor) -> ImageValues:
        """Run the model."""
        given = self._forward(pixel_values=pixels, **others)
        hidden: Tensor | None = getattr(given, "last_hidden_state", None)
        own: Tensor | None = given.logits if hidden is None else getattr(given, "pooler_output", None)
        return ImageValues(hidden, own)

    def _change(self, change: Callable[[], Callable[[], None]], images: Sequence[Pixels]) -> str | None:
        name = type(self.image).__name__
        return keep_if_equal(change, lambda: _comparable(self.encode(images)), name=name, dtype=self.image.dtype)

    def _padded(self, images: Sequence[Pixels]) -> ImageFeatures:
        """Encode images of different numbers of patches, padded to the largest.

        The result has no padding.
        """
        device = self.image.device
        patches = to_device(images, self._scale, device, self.image.dtype)
        counts = [len(image.values) for image in images]
        count, longest = len(counts), max(counts)
        places = [np.arange(own) + row * longest for row, own in enumerate(counts)]
        lengths, each = send_arrays([np.array(counts), *places], device).split_with_sizes([count, sum(counts)])
        rows = patches.new_zeros(count * longest, patches.shape[-1]).index_copy_(0, each, patches)
        real = torch.arange(longest, device=device) < lengths.unsqueeze(1)
        values = self._values(
            rows.view(count, longest, -1),
            pixel_attention_mask=real.long(),
            spatial_shapes=torch.tensor([image.grid for image in images]),  # the model reads it on the host
        )
        found = _features(values, count)
        if found.hidden is None:
            return found
        return ImageFeatures(found.hidden.index_select(0, each), lengths, counts, found.own)


def _features(values: ImageValues, count: int) -> ImageFeatures:
    """Join the values of `count` images, all with the same number of vectors."""
    hidden, own = values
    if hidden is None:
        return ImageFeatures(None, torch.ones(count, dtype=torch.int64), [1] * count, own)
    lengths = torch.full((count,), hidden.shape[1], device=hidden.device)
    return ImageFeatures(hidden.flatten(0, 1), lengths, [hidden.shape[1]] * count, own)


def _noise(sample: Pixels, seed: int) -> Pixels:
    """Return an image of noise in the shape of another."""
    values, random = sample.values, np.random.default_rng(seed)
    if values.dtype == np.uint8:
        return replace(sample, values=random.integers(256, size=values.shape, dtype=np.uint8))
    return replace(sample, values=random.standard_normal(values.shape, dtype=np.float32))


def _comparable(features: ImageFeatures) -> Tensor:
    """Return the values that checks compare: [rows, values], float32."""
    found = features.hidden if features.own is None else features.own
    assert found is not None
    return found.float()


def _joined(parts: Sequence[ImageFeatures]) -> ImageFeatures:
    hidden = [part.hidden for part in parts if part.hidden is not None]
    own = [part.own for part in parts if part.own is not None]
    return ImageFeatures(
        torch.cat(hidden) if hidden else None,
        torch.cat([part.lengths for part in parts]),
        [count for part in parts for count in part.counts],
        torch.cat(own) if own else None,
    )
