"""Look at images: run the part of a model that reads them, on pixels as they come from preprocess."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.models.images.scale import Scale, to_device
from staged_pool.runtime.models.kernels.linear import prepack_linears
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference, keep_if_equal
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.transformer.fused import fuse_layers, fusible_layers
from staged_pool.runtime.models.vision.patches import flatten_patches


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """What a model makes of images. The vectors of all of them lie one behind the other, without padding."""

    hidden: Tensor | None
    """[tokens, width], in the dtype of the weights. None: the model has been asked for labels."""
    lengths: Tensor
    """[images], int64, on the device: the number of vectors of each."""
    counts: Sequence[int]
    """The same on the host."""
    own: Tensor | None
    """[images, width]: what the model's own class makes of each, a vector or logits. None: it makes nothing."""


class ImageEncoder:
    """The part of a model that looks at images. May be used by several threads at once.

    Args:
        whole: The whole model, in eval mode. What is called is its `get_image_features`, or where it has none, itself.
        image: The transformer in it that reads images.
        scale: Of the reader that prepares them.
    """

    image: PreTrainedModel

    def __init__(self, whole: PreTrainedModel, image: PreTrainedModel, scale: Scale) -> None:
        self.image = image
        self._look: Callable[..., Any] = getattr(whole, "get_image_features", whole)
        self._scale = scale
        self._alone = False
        self._any_shape = "spatial_shapes" in inspect.signature(image.forward).parameters

    @property
    def any_shape(self) -> bool:
        """Whether images come as patches, more or fewer of them."""
        return self._any_shape

    @property
    def pads(self) -> bool:
        """Whether images of different shapes are padded to the largest one in a batch."""
        return self._any_shape and not self._alone

    def see(self, images: Sequence[Pixels]) -> ImageFeatures:
        """Look at images, which are all of one height and width unless they come as patches.

        Raises:
            ValueError: They are not as large as the model wants them.
        """
        if not self._any_shape:
            pixels = to_device(images, self._scale, self.image.device, self.image.dtype)
            return _seen(self._look(pixel_values=pixels), len(images))
        if self._alone and len({one.grid for one in images}) > 1:
            return _joined([self.see([one]) for one in images])
        return self._padded(images)

    def vectors(self, image: Pixels) -> int:
        """How many the transformer computes for an image."""
        if self._any_shape:
            return len(image.values)
        pixels = to_device([image], self._scale, self.image.device, self.image.dtype)
        hidden: Tensor = self.image(pixel_values=pixels).last_hidden_state
        return hidden.shape[1]

    def check_padding(self, images: Sequence[Pixels]) -> str | None:
        """Find out whether padding can be seen in what is made of images of different shapes. They then run by
        themselves.

        Returns:
            Why that is so; None where padding does not matter.
        """
        if not self._any_shape:
            return None
        with torch.inference_mode():
            alone = _vectors(_joined([self.see([one]) for one in images]))
            apart = difference(_vectors(self.see(images)), alone)
        if not apart > TOLERANCE[self.image.dtype]:  # NaN is for the warm-up to find
            return None
        self._alone = True
        return f"{type(self.image).__name__} gives other vectors beside padding (relative difference {apart:.2g})"

    def fuse(self, images: Sequence[Pixels]) -> str | None:
        """Run layers of a known structure in few calls, where that is right.

        Args:
            images: To find that out on.

        Returns:
            Why it was not done; None where it was, or where there are no such layers.
        """
        places = fusible_layers(self.image)
        return self._change(partial(fuse_layers, places), images) if places else None

    def prepack(self, images: Sequence[Pixels]) -> str | None:
        """Multiply patches instead of convolving them, and lay the weights of linear layers out for the processor,
        where that is right.

        Args:
            images: To find that out on.

        Returns:
            Why it was not done; None where it was.
        """

        def change() -> Callable[[], None]:
            restores = ExitStack()
            restores.callback(flatten_patches(self.image))
            restores.callback(prepack_linears(self.image))
            return restores.close

        return self._change(change, images)

    def _change(self, change: Callable[[], Callable[[], None]], images: Sequence[Pixels]) -> str | None:
        name = type(self.image).__name__
        return keep_if_equal(change, lambda: _vectors(self.see(images)), name=name, dtype=self.image.dtype)

    def _padded(self, images: Sequence[Pixels]) -> ImageFeatures:
        """Patches of different numbers, each image's behind those that are missing to the largest one."""
        device = self.image.device
        patches = to_device(images, self._scale, device, self.image.dtype)
        counts = [len(one.values) for one in images]
        count, longest = len(counts), max(counts)
        places = [np.arange(own) + row * longest for row, own in enumerate(counts)]
        lengths, each = send_arrays([np.array(counts), *places], device).split_with_sizes([count, sum(counts)])
        rows = patches.new_zeros(count * longest, patches.shape[-1]).index_copy_(0, each, patches)
        real = torch.arange(longest, device=device) < lengths.unsqueeze(1)
        given = self._look(
            pixel_values=rows.view(count, longest, -1),
            pixel_attention_mask=real.long(),
            spatial_shapes=torch.tensor([one.grid for one in images]),  # which the model reads on the host
        )
        found = _seen(given, count)
        if found.hidden is None:
            return found
        return ImageFeatures(found.hidden.index_select(0, each), lengths, counts, found.own)


def _seen(given: Any, count: int) -> ImageFeatures:
    """What the model has made of so many images, which have equally many vectors."""
    hidden: Tensor | None = getattr(given, "last_hidden_state", None)
    own: Tensor | None = given.logits if hidden is None else getattr(given, "pooler_output", None)
    if hidden is None:
        return ImageFeatures(None, torch.ones(count, dtype=torch.int64), [1] * count, own)
    lengths = torch.full((count,), hidden.shape[1], device=hidden.device)
    return ImageFeatures(hidden.flatten(0, 1), lengths, [hidden.shape[1]] * count, own)


def _vectors(seen: ImageFeatures) -> Tensor:
    """What can be compared: [rows, values]."""
    found = seen.hidden if seen.own is None else seen.own
    assert found is not None
    return found.float()


def _joined(seen: Sequence[ImageFeatures]) -> ImageFeatures:
    hidden = [one.hidden for one in seen if one.hidden is not None]
    own = [one.own for one in seen if one.own is not None]
    return ImageFeatures(
        torch.cat(hidden) if hidden else None,
        torch.cat([one.lengths for one in seen]),
        [count for one in seen for count in one.counts],
        torch.cat(own) if own else None,
    )
