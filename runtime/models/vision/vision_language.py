"""The eyes of a language model that is shown images: what it sees takes the places of image tokens.

An image becomes vectors as wide as those of tokens, which stand in the model's input where its text has image tokens.
Some models tell those vectors apart by where in the image they come from: such a token has three positions instead of
one, in time, down and across (Wang et al., 2024, Qwen2-VL, section 2.1, https://arxiv.org/abs/2409.12191).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from staged_pool.runtime.model import Pixels, TokenSequence
from staged_pool.runtime.models.images.scale import Scale, to_device
from staged_pool.runtime.models.kernels.linear import prepack_linears
from staged_pool.runtime.models.kernels.self_check import MISFITS, TOLERANCE, difference, keep_if_equal
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.transformer.fused import fuse_layers, fusible_layers
from staged_pool.runtime.models.transformer.image_embeds import ImageEmbeds
from staged_pool.runtime.models.transformer.packing import PackedBatch
from staged_pool.runtime.models.vision.patches import flatten_patches
from staged_pool.runtime.requests import Outputs
from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """How an image becomes tokens."""

    image_token: int
    """The id of the token whose places its vectors take."""
    merge: int | None
    """Patches along one edge that become one token. None: all images are of one size, and become as many tokens."""
    tokens: int
    """Of an image, where all are of one size."""
    grid_positions: bool
    """Whether its tokens are counted by rows and columns, instead of one after the other."""

    def of(self, patches: int | None) -> int:
        """How many tokens an image of so many patches takes, see `Pixels.patches`."""
        return self.tokens if self.merge is None or patches is None else patches // self.merge**2


def read_image_layout(model: PreTrainedModel) -> ImageLayout:
    """What a model's config says.

    Raises:
        ConfigError: It is not of a kind of model that is known here.
    """
    config = model.config
    image_token, rows = getattr(config, "image_token_id", None), model.get_input_embeddings().weight.shape[0]
    if not isinstance(image_token, int) or not 0 <= image_token < rows:
        raise ConfigError(
            f"config.json: image_token_id={image_token!r} is no token of the {rows} that the weights have"
        )
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        return ImageLayout(
            image_token=image_token,
            merge=config.vision_config.spatial_merge_size,
            tokens=0,
            grid_positions=True,
        )
    if config.model_type == "paligemma":
        edge = config.vision_config.image_size // config.vision_config.patch_size
        return ImageLayout(image_token=image_token, merge=None, tokens=edge * edge, grid_positions=False)
    raise ConfigError(f"config.json: model_type={config.model_type!r} is not known to be shown images between texts")


class VisionLanguage:
    """Turns the images of a batch into what its language model gets in the places of their image tokens.

    Args:
        model: The whole model, in eval mode, with `get_image_features` as transformers has it.
        layout: What its config says of images.
        scale: Of the reader that prepares them.
        sample: Any image that the reader has prepared, to try the model with.
    """

    layout: ImageLayout
    parameters: int
    """Of all but the language model."""

    def __init__(self, model: PreTrainedModel, layout: ImageLayout, scale: Scale, sample: Pixels) -> None:
        self._model = model
        self.layout = layout
        self._scale = scale
        self.parameters = sum(p.numel() for part in self.parts() for p in part.parameters())
        self._sample = sample
        self._words = _ordinary_ids(model, layout.image_token)
        text_config = self.language.config
        if getattr(text_config, "use_bidirectional_attention", False):
            text_config.is_causal = False  # which its masks go by when it is run by itself

    def see(self, sequences: Sequence[TokenSequence]) -> ImageEmbeds | None:
        """Look at the images of sequences that lie one behind the other. None: there are none.

        Images are looked at together, and none sees another.
        """
        images = [pixels for sequence in sequences for pixels in sequence.images]
        if not images:
            return None
        device = self._model.device
        where = [where_images_are(sequence, self.layout) for sequence in sequences]
        starts = np.cumsum([0, *(len(sequence.ids) for sequence in sequences)])
        places = np.concatenate([found + start for found, start in zip(where, starts[:-1], strict=True)])
        positions = None
        if self.layout.grid_positions:
            counted = [grid_positions(s, found, self.layout) for s, found in zip(sequences, where, strict=True)]
            positions = send_arrays([np.concatenate(counted, axis=1)], device)
        return ImageEmbeds(self._look(images), send_arrays([places], device), places, positions)

    def _look(self, images: Sequence[Pixels]) -> Tensor:
        """[image tokens, width]."""
        model = self._model
        pixels = to_device(images, self._scale, model.device, model.dtype)
        more = {}
        if self.layout.merge is not None:
            grids = [[1, *(pixels.grid or (0, 0))] for pixels in images]
            more["image_grid_thw"] = send_arrays([np.array(grids)], model.device)
        seen = model.get_image_features(pixels, **more).pooler_output
        vectors: Tensor = torch.cat(list(seen)) if not isinstance(seen, Tensor) else seen.flatten(0, 1)
        return vectors.to(model.dtype)

    @property
    def language(self) -> PreTrainedModel:
        """The language model, which reads what was seen."""
        model: PreTrainedModel = self._model.language_model
        return model

    def check(self, hidden: Callable[[PackedBatch, ImageEmbeds | None], Tensor]) -> None:
        """Compare what is made of an image between words with what the model makes of it when it is left to itself,
        which it can be only until its attention is replaced.

        Args:
            hidden: The token vectors of a batch as they are computed here: [tokens, width].

        Raises:
            ConfigError: They are not the same, or the model fails.
        """
        name, device = type(self._model).__name__, self._model.device
        words, image = self._words[:3], self.layout.image_token
        sequence = self.made_up(0, words, frozenset())
        sequence = replace(sequence, ids=[*words, *sequence.ids, *words])
        row = torch.tensor([sequence.ids], device=device)
        given: dict[str, Tensor] = {"attention_mask": torch.ones_like(row)}
        if self._sample.grid is None:
            given["token_type_ids"] = torch.zeros_like(row)
        else:
            given["image_grid_thw"] = torch.tensor([[1, *self._sample.grid]], device=device)
            given["mm_token_type_ids"] = (row == image).long()
        try:
            with torch.inference_mode():
                pixels = to_device([self._sample], self._scale, device, self._model.dtype)
                wanted = self._model(input_ids=row, pixel_values=pixels, **given)[0][0]
                found = hidden(PackedBatch.of([sequence], device), self.see([sequence]))
                apart = difference(found, wanted)
        except MISFITS as error:
            raise ConfigError(f"the model fails on an image: {error}") from error
        if apart > TOLERANCE[self._model.dtype]:  # NaN is for the warm-up to find
            raise ConfigError(f"{name} gives other vectors when shown an image (relative difference {apart:.2g})")

    def made_up(self, tokens: int, words: Sequence[int], outputs: Outputs) -> TokenSequence:
        """An image with as many of these words behind it as make so many tokens of it, if it has not more itself.

        The image token is none of them: it may be the id of an ordinary word, but stands for an image here.
        """
        shown = [self.layout.image_token] * self.layout.of(self._sample.patches)
        more = max(0, tokens - len(shown))
        others = [word if word != self.layout.image_token else self._words[0] for word in words[:more]]
        return TokenSequence([*shown, *others], outputs, images=(self._sample,))

    def probe(self) -> tuple[PackedBatch, ImageEmbeds]:
        """A batch of sequences with and without images between random words, of different lengths."""
        random = np.random.default_rng(1)
        image = self.made_up(0, (), frozenset())

        def words(count: int) -> list[int]:
            return [self._words[place] for place in random.integers(len(self._words), size=count)]

        sequences = [
            replace(image, ids=[*words(3), *image.ids, *words(9)]),
            TokenSequence(words(5), frozenset()),
            replace(image, ids=[*words(1), *image.ids, *words(2), *image.ids, *words(4)], images=image.images * 2),
        ]
        with torch.inference_mode():
            shown = self.see(sequences)
        assert shown is not None
        return PackedBatch.of(sequences, self._model.device), shown

    def fuse(self) -> str | None:
        """Run layers that see in few calls, where they are of a known structure, run on the CPU, and that is right.

        Returns:
            Why it was not done; None where it was, or where there are no such layers.
        """
        places = [place for part in self.parts() for place in fusible_layers(part)]
        if self._model.device.type != "cpu" or not places:
            return None
        return self._change(partial(fuse_layers, places))

    def prepack(self) -> str | None:
        """Lay the weights that see out for the processor, as far as it gains by that and that is right.

        Returns:
            Why it was not done; None where it was.
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
        return keep_if_equal(change, lambda: self._look([self._sample]), name="its sight", dtype=self._model.dtype)

    def parts(self) -> Iterator[torch.nn.Module]:
        """Everything but the language model."""
        return (part for part in self._model.children() if part is not self.language)


def _ordinary_ids(model: PreTrainedModel, image_token: int) -> list[int]:
    """Ids for words of made-up texts: none that stands for an image, a video or an end of one.

    Raises:
        ConfigError: The vocabulary has fewer than three.
    """
    names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = {image_token, *(getattr(model.config, name, None) for name in names)}
    rows = model.get_input_embeddings().weight.shape[0]
    words = [word for word in range(3, min(1000, rows)) if word not in marks]
    if len(words) < 3:
        raise ConfigError(f"the weights have only {rows} tokens, which are too few for words beside those of images")
    return words


def where_images_are(sequence: TokenSequence, layout: ImageLayout) -> NDArray[np.int64]:
    """The places of the image tokens in a sequence, ascending; none where it has no images: it is a word there."""
    if not sequence.images:
        return np.empty(0, np.int64)
    return np.flatnonzero(np.asarray(sequence.ids) == layout.image_token)


def grid_positions(sequence: TokenSequence, places: NDArray[np.int64], layout: ImageLayout) -> NDArray[np.int64]:
    """Where each token of a sequence stands: in time, down and across, [3, tokens].

    A word stands one further than what was before it, in all three. The tokens of an image share their time, and stand
    in rows and columns from there on; what follows goes on behind its longer edge.

    Args:
        sequence: Its image tokens are those of its images, in order.
        places: Of the image tokens.
        layout: What its config says of images.
    """
    positions = np.empty((3, len(sequence.ids)), np.int64)
    place = at = 0
    left = places
    for pixels in sequence.images:
        high, wide = (edge // (layout.merge or 1) for edge in pixels.grid or (1, 1))
        first = int(left[0])
        words = first - place
        positions[:, place:first] = np.arange(at, at + words)
        at += words
        place = first + high * wide
        positions[0, first:place] = at
        positions[1, first:place] = at + np.arange(high).repeat(wide)
        positions[2, first:place] = at + np.tile(np.arange(wide), high)
        at += max(high, wide)
        left = left[high * wide :]
    positions[:, place:] = np.arange(at, at + len(sequence.ids) - place)
    return positions
