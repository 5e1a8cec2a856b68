"""Image embeddings of a vision-language model, in the places of image tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.models.kernels.linear import prepack_linears
from staged_pool.runtime.models.kernels.misuse import MISUSE_ERRORS
from staged_pool.runtime.models.kernels.self_check import TOLERANCE, difference, keep_if_equal
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.transformer.fused import fuse_layers, fusible_layers
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.vision.image_layout import ImageLayout, grid_positions, image_token_places
from staged_pool.runtime.models.vision.patches import flatten_patches
from staged_pool.runtime.payloads import Pixels, TokenSequence
from staged_pool.runtime.requests import Outputs
from staged_pool.stages.errors import ConfigError

_TILES: Final = 32
"""Tiles that are encoded at once: one of 512 pixels has 1,024 patches, and 32 take 0.4 GB inside SigLIP-base."""


class ImageEmbedder:
    """Computes the vectors that a language model gets in the places of image tokens.

    Args:
        model: The whole model, in eval mode, with `get_image_features` as transformers has it.
        layout: Layout of the model's images.
        scale: Scale of the reader that prepares the images.
        sample: Any image that the reader has prepared, for checks of the model.
    """

    layout: ImageLayout
    parameters: int
    """Parameters of all parts except the language model."""

    def __init__(self, model: PreTrainedModel, layout: ImageLayout, scale: Scale, sample: Pixels) -> None:
        self._model = model
        self.layout = layout
        self._scale = scale
        self.parameters = sum(p.numel() for part in self.parts() for p in part.parameters())
        self._sample = sample
        self._words = _ordinary_ids(model, layout.image_token)
        text_config = self.language.config
        if getattr(text_config, "use_bidirectional_attention", False):
            text_config.is_causal = False  # masks depend on it if the language model runs by itself

    def embed(self, sequences: Sequence[TokenSequence]) -> ImageEmbeds | None:
        """Encode the images of a packed batch of sequences. None: the batch has no images.

        One call encodes all images. None of them attends to another.
        """
        images = [pixels for sequence in sequences for pixels in sequence.images]
        if not images:
            return None
        device = self._model.device
        places_of_each = [image_token_places(sequence, self.layout) for sequence in sequences]
        starts = np.cumsum([0, *(len(sequence.ids) for sequence in sequences)])
        places = np.concatenate([found + start for found, start in zip(places_of_each, starts[:-1], strict=True)])
        positions = None
        if self.layout.grid_positions:
            of_each = [
                grid_positions(s, found, self.layout) for s, found in zip(sequences, places_of_each, strict=True)
            ]
            positions = send_arrays([np.concatenate(of_each, axis=1)], device)
        vectors, *deepstack = self._features(images)
        added = torch.stack(deepstack) if deepstack else None
        return ImageEmbeds(vectors, send_arrays([places], device), places, positions, added)

    def _features(self, images: Sequence[Pixels]) -> list[Tensor]:
        """Run the image encoder.

        Returns:
            [image tokens, width] each: the vectors of the images, then those of `ImageEmbeds.deepstack` by layer.
        """
        model = self._model
        pixels = to_device(images, self._scale, model.device, model.dtype)
        if self.layout.tiled:
            return [torch.cat([self._tiles(part) for part in torch.split(pixels, _TILES)])]
        more = {}
        if self.layout.merge is not None:
            grids = [[pixels.steps, *(pixels.grid or (0, 0))] for pixels in images]
            more["image_grid_thw"] = send_arrays([np.array(grids)], model.device)
        found = model.get_image_features(pixels, **more)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return [_joined(features).to(model.dtype) for features in layers]

    def _tiles(self, pixels: Tensor) -> Tensor:
        """Encode tiles, [tiles, 3, edge, edge], as the vectors of their tokens, [tokens, width].

        `get_image_features` would take a tile that is zero everywhere for padding.
        """
        hidden = self._model.vision_model(pixel_values=pixels).last_hidden_state
        vectors: Tensor = self._model.connector(hidden)
        return vectors.flatten(0, 1).to(self._model.dtype)

    @property
    def language(self) -> PreTrainedModel:
        """The language model, which reads the image embeddings."""
        model: PreTrainedModel = self._model.text_model if self.layout.tiled else self._model.language_model
        return model

    def check(self, hidden: Callable[[PackedBatch, ImageEmbeds | None], Tensor]) -> None:
        """Compare our token vectors for an image between words with those of the original model.

        Call it before the model's attention is replaced: afterwards the original no longer runs.

        Args:
            hidden: Our computation: the token vectors of a batch, [tokens, width].

        Raises:
            ConfigError: They differ, or the model fails.
        """
        name, device = type(self._model).__name__, self._model.device
        words, image = self._words[:3], self.layout.image_token
        sequence = self.sample_sequence(0, words, frozenset())
        sequence = replace(sequence, ids=[*words, *sequence.ids, *words])
        row = torch.tensor([sequence.ids], device=device)
        given: dict[str, Tensor] = {"attention_mask": torch.ones_like(row)}
        if self.layout.tiled:
            pass  # tiles need no further inputs
        elif self._sample.grid is None:
            given["token_type_ids"] = torch.zeros_like(row)
        else:
            given["image_grid_thw"] = torch.tensor([[1, *self._sample.grid]], device=device)
            given["mm_token_type_ids"] = (row == image).long()
        try:
            with torch.inference_mode():
                pixels = to_device([self._sample], self._scale, device, self._model.dtype)
                pixels = pixels.unsqueeze(0) if self.layout.tiled else pixels
                wanted = self._model(input_ids=row, pixel_values=pixels, **given)[0][0]
                found = hidden(PackedBatch.of([sequence], device), self.embed([sequence]))
                apart = difference(found, wanted)
        except MISUSE_ERRORS as error:
            raise ConfigError(f"the model fails on an image: {error}") from error
        if apart > TOLERANCE[self._model.dtype]:  # the warm-up reports NaN
            raise ConfigError(
                f"{name} gives other vectors for an image between words than transformers "
                f"(relative difference {apart:.2g})"
            )

    def sample_sequence(self, tokens: int, words: Sequence[int], outputs: Outputs) -> TokenSequence:
        """Return the sample image, followed by words up to a number of tokens.

        Args:
            tokens: Tokens of the sequence; more, if the image alone has more.
            words: Ids of words. The image token among them is replaced, since here it stands for an image.
            outputs: Outputs of the sequence.
        """
        image = [self.layout.image_token] * self.layout.tokens_of(self._sample.patches)
        more = max(0, tokens - len(image))
        others = [word if word != self.layout.image_token else self._words[0] for word in words[:more]]
        return TokenSequence([*image, *others], outputs, images=(self._sample,))

    def probe(self) -> tuple[PackedBatch, ImageEmbeds]:
        """Return a batch of sequences with and without images between random words, of different lengths."""
        random = np.random.default_rng(1)
        image = self.sample_sequence(0, (), frozenset())

        def words(count: int) -> list[int]:
            return [self._words[place] for place in random.integers(len(self._words), size=count)]

        sequences = [
            replace(image, ids=[*words(3), *image.ids, *words(9)]),
            TokenSequence(words(5), frozenset()),
            replace(image, ids=[*words(1), *image.ids, *words(2), *image.ids, *words(4)], images=image.images * 2),
        ]
        with torch.inference_mode():
            embeds = self.embed(sequences)
        assert embeds is not None
        return PackedBatch.of(sequences, self._model.device), embeds

    def fuse(self) -> str | None:
        """Fuse the encoder layers of known structure on the CPU, if the results stay equal.

        Returns:
            The reason why not. None: it is done, or there are no such layers.
        """
        places = [place for part in self.parts() for place in fusible_layers(part)]
        if self._model.device.type != "cpu" or not places:
            return None
        return self._change(partial(fuse_layers, places))

    def prepack(self) -> str | None:
        """Multiply patches instead of convolving them, and prepack linear layers on the CPU.

        Returns:
            The reason why not, if the results would differ. None: it is done.
        """

        def change() -> Callable[[], None]:
            restores = ExitStack()
            for part in self.parts():
                restores.callback(flatten_patches(part))
                if self._model.device.type == "cpu":
                    restores.callback(prepack_linears(part))
            return restores.close

        return self._change(change)

    def _change(self, change: Callable[[], Callable[[], None]]) -> str | None:
        def features() -> Tensor:
            return torch.cat(self._features([self._sample]))

        return keep_if_equal(change, features, name="the image encoder", dtype=self._model.dtype)

    def parts(self) -> Iterator[torch.nn.Module]:
        """Yield all parts except the language model."""
        return (part for part in self._model.children() if part is not self.language)


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Join the vectors of all images: [image tokens, width]."""
    return features.flatten(0, 1) if isinstance(features, Tensor) else torch.cat(list(features))


def _ordinary_ids(model: PreTrainedModel, image_token: int) -> list[int]:
    """Return ids for words of made-up texts, without the marks of images and videos.

    Raises:
        ConfigError: The vocabulary has fewer than three.
    """
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = {image_token, *(getattr(model.config, name, None) for name in names)}
    rows = model.get_input_embeddings().weight.shape[0]
    words = [word for word in range(3, min(1000, rows)) if word not in marks]
    if len(words) < 3:
        raise ConfigError(f"the weights have only {rows} tokens: too few for words beside the tokens of images")
    return words
