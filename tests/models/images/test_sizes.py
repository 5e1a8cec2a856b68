"""The rules of sizes beside those of transformers, and resizing beside Pillow's, on many shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.image_transforms import center_crop, get_resize_output_image_size
from transformers.image_utils import ChannelDimension
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

from staged_pool.runtime.models.images.fast_processor import read_fast
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings, Resample
from staged_pool.runtime.models.images.sizes import MAX_ASPECT, PatchBudget, PixelRange, ShortestEdge, Size
from staged_pool.stages.errors import UnusableMedia

edges = st.integers(1, 5000)


@settings(deadline=None)
@given(edges, edges, st.integers(1, 600))
def test_the_shorter_edge_is_that_of_transformers(height: int, width: int, shortest: int) -> None:
    assume(max(height, width) <= MAX_ASPECT * min(height, width))
    wanted = get_resize_output_image_size(
        np.empty((3, height, width), dtype=np.bool_),
        shortest,
        default_to_square=False,
        input_data_format=ChannelDimension.FIRST,
    )
    assert ShortestEdge(shortest).of((height, width)) == wanted


@settings(deadline=None)
@given(edges, edges, st.sampled_from([14, 28, 32]), st.integers(1, 10**5), st.integers(0, 10**7))
def test_a_range_of_pixels_is_that_of_qwen(height: int, width: int, block: int, least: int, more: int) -> None:
    span = PixelRange(block, least, least + more)
    if max(height, width) > MAX_ASPECT * min(height, width):
        with pytest.raises(UnusableMedia):
            span.of((height, width))
        with pytest.raises(ValueError, match="aspect ratio"):
            smart_resize(height, width, block, least, least + more)
        return
    assert span.of((height, width)) == smart_resize(height, width, block, least, least + more)


@settings(deadline=None)
@given(edges, edges, st.sampled_from([14, 16]), st.integers(1, 2000))
def test_a_budget_of_patches_is_that_of_siglip2(height: int, width: int, patch: int, most: int) -> None:
    tall, wide = PatchBudget(patch, most).of((height, width))
    assert (tall, wide) == get_image_size_for_max_num_patches(height, width, patch, most)
    assert (tall // patch) * (wide // patch) <= most


sides = st.integers(1, 90)


@settings(deadline=None, max_examples=300)
@given(st.tuples(sides, sides), st.tuples(sides, sides), st.sampled_from(["bilinear", "bicubic"]), st.integers(0, 9))
def test_resized_bytes_are_those_of_pillow_up_to_two_steps(
    size: Size, target: Size, resample: Resample, seed: int
) -> None:
    # Black and white dots are the hardest: every one of them overshoots.
    dots = np.random.default_rng(seed).integers(0, 2, (*size, 3)).astype(np.uint8) * 255
    source = Pillow.fromarray(dots)
    filter = {"bilinear": Pillow.Resampling.BILINEAR, "bicubic": Pillow.Resampling.BICUBIC}[resample]
    wanted = np.asarray(source.resize((target[1], target[0]), filter)).transpose(2, 0, 1).astype(int)
    found = read_fast(source, target, _settings(resample)).values
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 2


@settings(deadline=None)
@given(sides, sides, sides, sides)
def test_the_middle_is_that_of_transformers(height: int, width: int, tall: int, wide: int) -> None:
    values = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    cut = _settings("bilinear", crop=(tall, wide))
    found = read_fast(Pillow.fromarray(values), (height, width), cut).values
    wanted = center_crop(values.transpose(2, 0, 1), (tall, wide), input_data_format=ChannelDimension.FIRST)
    assert np.array_equal(found, wanted)


def _settings(resample: Resample, crop: Size | None = None) -> ImageSettings:
    return ImageSettings(
        folder=Path(),
        processor="",
        resize=None,
        resample=resample,
        crop=crop,
        scale=Scale((1.0, 1.0, 1.0), (0.0, 0.0, 0.0)),
    )
