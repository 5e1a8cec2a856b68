"""Layout of images and videos in a token sequence: the places and positions of their tokens.

An image becomes vectors as wide as those of tokens. They stand in the model's input where its text has image tokens.
Some models give each such token three positions instead of one: in time, down and across (Wang et al., 2024, Qwen2-VL,
section 2.1, https://arxiv.org/abs/2409.12191).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.models.videos.settings import VideoRule
from staged_pool.runtime.payloads import Pixels, TokenSequence
from staged_pool.stages.errors import ConfigError

SHUFFLES: Final[Mapping[str, str]] = {"idefics3": "scale_factor", "modernvbert": "pixel_shuffle_factor"}
"""Models of tiles by `model_type`, and the field with the patches merged along an edge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The number and the positions of the image tokens of an image."""

    image_token: int
    """Id of the token whose places the vectors of an image take."""
    merge: int | None
    """Patches along one edge that become one token. None: all images have one size and `tokens` tokens."""
    tokens: int
    """Tokens of an image, if all images have one size; or of a tile."""
    grid_positions: bool
    """Image tokens are numbered by rows and columns, instead of one after the other."""
    video_token: int | None = None
    """Id of the token whose places the vectors of a video take. None: the model reads no videos."""
    tiled: bool = False
    """Images are tiles of `tokens` tokens, with texts between them. Several are followed by one of the whole image."""
    positions_per_second: float | None = None
    """Positions in time for each second of a video. None: one for each step, whatever its length."""
    step_marks: tuple[int, int] | None = None
    """Ids of the tokens around each step of a video. The step is placed as an image, behind its time as text.

    None: all steps of a video stand together, and go on in time.
    """

    @property
    def video_rule(self) -> VideoRule | None:
        """Rules of the model's video processor. None: the model reads no videos."""
        if self.video_token is None:
            return None
        return "qwen2" if self.step_marks is None else "qwen3"

    def tokens_of(self, patches: int | None) -> int:
        """Return the number of image tokens of an image.

        Args:
            patches: Its number of patches, see `Pixels.patches`.
        """
        if self.tiled and patches is not None:
            return self.tokens * (patches + 1 if patches > 1 else 1)
        return self.tokens if self.merge is None or patches is None else patches // self.merge**2


def read_image_layout(config: Any, rows: int) -> ImageLayout:
    """Read the layout from a model's config.

    Args:
        config: Config of the whole model, of transformers.
        rows: Rows of its token embedding.

    Raises:
        ConfigError: The kind of model is not supported.
    """
    image_token = getattr(config, "image_token_id", None)
    if not isinstance(image_token, int) or not 0 <= image_token < rows:
        raise ConfigError(
            f"config.json: image_token_id={image_token!r} is no token of the {rows} that the weights have"
        )
    if config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "paddleocr_vl"):
        return ImageLayout(
            image_token=image_token,
            merge=config.vision_config.spatial_merge_size,
            tokens=0,
            grid_positions=True,
            video_token=_video_token(config, rows),
            positions_per_second=getattr(config.vision_config, "tokens_per_second", None),
            step_marks=_step_marks(config, rows),
        )
    if config.model_type == "paligemma":
        edge = config.vision_config.image_size // config.vision_config.patch_size
        return ImageLayout(image_token=image_token, merge=None, tokens=edge * edge, grid_positions=False)
    if config.model_type in SHUFFLES:
        shuffle = getattr(config, SHUFFLES[config.model_type])
        edge = config.vision_config.image_size // config.vision_config.patch_size // shuffle
        return ImageLayout(image_token=image_token, merge=None, tokens=edge * edge, grid_positions=False, tiled=True)
    raise ConfigError(f"config.json: model_type={config.model_type!r} is not supported with images between texts")


def _video_token(config: Any, rows: int) -> int | None:
    """Return the token of videos. None: the model reads none, or its weights do not have the token."""
    token = getattr(config, "video_token_id", None)
    known = isinstance(token, int) and 0 <= token < rows and token != config.image_token_id
    reads = config.model_type in ("qwen2_vl", "qwen2_5_vl") or _step_marks(config, rows) is not None
    return token if known and reads else None


def _step_marks(config: Any, rows: int) -> tuple[int, int] | None:
    """Return the tokens around a step of a video. None: the model has no such tokens."""
    if config.model_type != "qwen3_vl":
        return None
    marks = config.vision_start_token_id, config.vision_end_token_id
    return marks if all(isinstance(mark, int) and 0 <= mark < rows for mark in marks) else None


def image_token_places(sequence: TokenSequence, layout: ImageLayout) -> NDArray[np.int64]:
    """Return the places of the tokens of images and videos in a sequence, ascending.

    A sequence without images has none: there, the image token is an ordinary word.
    """
    if not sequence.images:
        return np.empty(0, np.int64)
    ids = np.asarray(sequence.ids)
    if layout.video_token is None:
        return np.flatnonzero(ids == layout.image_token)
    return np.flatnonzero((ids == layout.image_token) | (ids == layout.video_token))


def grid_positions(sequence: TokenSequence, places: NDArray[np.int64], layout: ImageLayout) -> NDArray[np.int64]:
    """Return the position of each token of a sequence: in time, down and across, [3, tokens].

    A word takes the next position in all three. The tokens of an image share their time, and are numbered by rows and
    columns from there. A video has the rows and columns of an image in each of its steps, which go on in time. The next
    word continues behind the largest of all these numbers, as in training. Some versions of transformers forget the
    time here (https://github.com/huggingface/transformers/issues/45381). With `step_marks`, each step is an image.

    Args:
        sequence: Its image tokens are those of its images, in order.
        places: Places of the image tokens, from `image_token_places`.
        layout: Layout of the model's images.
    """
    positions = np.empty((3, len(sequence.ids)), np.int64)
    place = at = 0
    left = places
    for pixels in _apart(sequence.images, layout):
        high, wide = (edge // (layout.merge or 1) for edge in pixels.grid or (1, 1))
        first = int(left[0])
        words = first - place
        positions[:, place:first] = np.arange(at, at + words)
        at += words
        steps, each = pixels.steps, high * wide
        place = first + steps * each
        times = _times(pixels, layout)
        positions[0, first:place] = at + times.repeat(each)
        positions[1, first:place] = at + np.tile(np.arange(high).repeat(wide), steps)
        positions[2, first:place] = at + np.tile(np.arange(wide), steps * high)
        at += max(high, wide, int(times[-1]) + 1)
        left = left[steps * each :]
    positions[:, place:] = np.arange(at, at + len(sequence.ids) - place)
    return positions


def _apart(images: Sequence[Pixels], layout: ImageLayout) -> Iterator[Pixels]:
    """Yield each image, video or step of a video that is placed by itself."""
    for pixels in images:
        if layout.step_marks is None:
            yield pixels
        else:
            yield from repeat(replace(pixels, steps=1, step_s=None), pixels.steps)


def _times(pixels: Pixels, layout: ImageLayout) -> NDArray[np.int64]:
    """Return the position in time of each step, from 0: whole numbers, cut from float32 as in transformers."""
    steps = np.arange(pixels.steps)
    if layout.positions_per_second is None or pixels.step_s is None:
        return steps
    return (steps.astype(np.float32) * np.float32(layout.positions_per_second * pixels.step_s)).astype(np.int64)
