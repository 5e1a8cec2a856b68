"""Images as they are stored, of which RGB is made in strips: the same pixels as of the whole at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_array_equal
from PIL import Image as Pillow

from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.decoded import STRIP_PIXELS, Decoded
from staged_pool.runtime.models.images.fast_processor import read_fast
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings, Resample
from staged_pool.runtime.models.images.sizes import Size, begins_with_columns
from tests.models.images.drawing import pixels

WIDE = (911, 733)
"""Width and height of an image of several strips, cut along either side."""
ORIENTATIONS = range(1, 9)


def upright(values: np.ndarray, orientation: int) -> np.ndarray:
    """Undo what a camera has stored (EXIF 2.32, 4.6.4)."""
    return {
        1: lambda: values, 2: lambda: values[:, ::-1], 3: lambda: values[::-1, ::-1], 4: lambda: values[::-1],
        5: lambda: values.transpose(1, 0, 2), 6: lambda: np.rot90(values, -1),
        7: lambda: np.rot90(values, 2).transpose(1, 0, 2), 8: lambda: np.rot90(values, 1),
    }[orientation]()  # fmt: skip


def settings(resample: Resample) -> ImageSettings:
    scale = Scale((1.0, 1.0, 1.0), (0.0, 0.0, 0.0))
    return ImageSettings(folder=Path(), processor="", resize=None, resample=resample, crop=None, scale=scale)


def test_the_image_of_these_tests_has_several_strips() -> None:
    assert WIDE[0] * WIDE[1] > 2 * STRIP_PIXELS


@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_strips_are_those_of_the_upright_image(orientation: int, rows: bool) -> None:
    values = pixels(*WIDE)
    wanted = upright(values, orientation)
    decoded = Decoded(Pillow.fromarray(values), orientation)
    assert decoded.size == wanted.shape[:2]
    seen = 0
    for box in decoded.strips(rows=rows):
        left, top, right, bottom = box
        assert_array_equal(np.asarray(decoded.part(box)), wanted[top:bottom, left:right])
        seen += (right - left) * (bottom - top)
    assert seen == WIDE[0] * WIDE[1]
    assert_array_equal(np.asarray(decoded.whole()), wanted)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_strips_of_every_mode_are_those_of_the_whole(mode: str) -> None:
    values = pixels(*WIDE)
    colour = Pillow.fromarray(values)
    colour.putalpha(Pillow.fromarray(pixels(*WIDE, seed=1)[..., 0]))
    if mode == "I;16":
        image = Pillow.fromarray(values[..., 0].astype(np.uint16) * np.uint16(257))
    else:
        image = colour.convert(mode)
    if mode == "P":
        image.info["transparency"] = 7
    at_once = Decoded(image, background=(9, 90, 200)).part((0, 0, *WIDE))
    assert at_once.mode == "RGB"
    assert_array_equal(np.asarray(Decoded(image, background=(9, 90, 200)).whole()), np.asarray(at_once))


@pytest.mark.parametrize("target", [(224, 224), (100, 911), (733, 50), (30, 905), (1000, 1200), (733, 911)])
@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_an_image_resized_in_strips_has_the_bits_of_one_resized_whole(target: Size, resample: Resample) -> None:
    values = pixels(*WIDE)
    marked = Pillow.fromarray(values)
    marked.info["transparency"] = (1, 2, 3)  # so that it is not taken as it lies there
    assert not (values == (1, 2, 3)).all(axis=-1).any()
    found = read_fast(marked, target, settings(resample)).values
    assert_array_equal(read_fast(Pillow.fromarray(values), target, settings(resample)).values, found)
    # Four channels lie together, as in Pillow: torch's code for three rounds otherwise.
    padded = np.concatenate([values, np.full((*values.shape[:2], 1), 255, np.uint8)], axis=-1)
    whole = torch.from_numpy(padded).permute(2, 0, 1)[None]
    first = (target[0], WIDE[0]) if begins_with_columns((WIDE[1], WIDE[0]), target) else (WIDE[1], target[1])
    for size in (first, target):
        if whole.shape[-2:] != size:
            whole = F.interpolate(whole, size, mode=resample, antialias=True)
    assert_array_equal(found, whole[0, :3].numpy())


def test_a_transparent_colour_of_sixteen_bits_is_found_in_every_strip() -> None:
    from tests.models.images.test_decode import grey_or_rgb

    clear, near = (0x1234, 0x5678, 0x9ABC), (0x1234, 0x5679, 0x9ABC)
    data = grey_or_rgb(16, clear, near, clear=clear, interlaced=False)
    decoded = Encoded(data, ImageLimits(10**6, 10**6)).load((1, 2, 3))
    parts = [np.asarray(decoded.part((left, 0, left + 1, 1)))[0, 0].tolist() for left in range(2)]
    assert parts == [[1, 2, 3], [0x12, 0x56, 0x9A]]
