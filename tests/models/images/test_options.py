"""Options of a caller for one image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import InvalidInput, TooLarge
from tests.models.images.drawing import Folder, drawing, encode, image, reader

HONOURED: list[tuple[str, dict[str, Any]]] = [
    ("qwen2-vl", {"max_pixels": 20 * 784}),
    ("qwen2-vl", {"min_pixels": 290 * 784}),
    ("qwen2-vl", {"size": {"shortest_edge": 784, "longest_edge": 50 * 784}}),
    ("qwen2-vl", {"min_pixels": 100 * 784, "max_pixels": 100 * 784}),
    ("siglip2-naflex", {"max_num_patches": 9}),
    ("clip", {"size": {"shortest_edge": 300}}),
    ("clip", {"size": {"height": 224, "width": 224}}),
    ("clip", {"do_resize": False}),
    ("clip", {"do_center_crop": False, "size": {"height": 224, "width": 224}}),
    ("clip", {"size": {"shortest_edge": 100}}),
    ("siglip", {"size": {"shortest_edge": 80}, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}}),
]


@pytest.mark.parametrize(("family", "options"), HONOURED)
@pytest.mark.parametrize("path", ["fast", "exact"])
def test_options_change_an_image_as_they_do_in_transformers(
    family: str, options: dict[str, Any], path: str, family_folder: Folder
) -> None:
    ours = reader(family_folder(family), image_path=path)
    data = encode(drawing(400, 300))
    found = ours.read(Image(data, options))
    arguments = dict(options)
    for name, key in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if name in arguments:  # transformers 5.23 says so, and warns of the older names
            both = {"shortest_edge": ours.settings.min_pixels, "longest_edge": ours.settings.max_pixels}
            arguments["size"] = {**both, **arguments.get("size", {}), key: arguments.pop(name)}
    processor = AutoImageProcessor.from_pretrained(family_folder(family), backend="pil")
    made = processor(images=Pillow.open(io.BytesIO(data)), return_tensors="pt", **arguments)
    wanted = made["pixel_values"]
    if "spatial_shapes" in made:
        wanted = wanted[0, : int(made["spatial_shapes"][0].prod())]
    scaled = to_device([found], ours.scale, "cpu", torch.float32)
    assert scaled.shape == wanted.shape
    assert float((scaled - wanted).abs().max()) / max(ours.scale.factor) <= (2.1 if path == "fast" else 0)
    plain = ours.read(Image(data))
    assert plain.values.shape != found.values.shape or not np.array_equal(plain.values, found.values)


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("clip", {"max_pixels": 9}, "'max_pixels' is not known: this model knows do_center_crop, do_resize, size"),
        ("qwen2-vl", {"crop_size": 9}, "'crop_size' is not known: this model knows do_resize, max_pixels, min_pixels"),
        ("clip", {"x" * 500: 1}, "x…' is not known"),
        ("clip", {"do_normalize": False}, "'do_normalize' is not known"),
        ("qwen2-vl", {"max_pixels": 301 * 784}, f"max_pixels must be a whole number from 1 to {300 * 784}"),
        ("qwen2-vl", {"max_pixels": 0}, "max_pixels must be a whole number from 1"),
        ("qwen2-vl", {"max_pixels": True}, "max_pixels must be a whole number"),
        ("qwen2-vl", {"max_pixels": 1e5}, "max_pixels must be a whole number"),
        ("qwen2-vl", {"min_pixels": 1000, "max_pixels": 999}, "min_pixels must be a whole number from 1 to 999"),
        ("qwen2-vl", {"size": {"height": 28}}, "size must be an object with no other fields than shortest_edge"),
        ("qwen2-vl", {"size": 28}, "size must be an object"),
        ("qwen2-vl", {"do_resize": "no"}, "do_resize must be true or false"),
        ("qwen2-vl", {"do_resize": False}, "edges of an image must be multiples of 28 pixels"),
        ("siglip2-naflex", {"max_num_patches": 101}, "max_num_patches must be a whole number from 1 to 100"),
        ("siglip2-naflex", {"do_resize": False}, "edges of an image must be multiples of 16 pixels"),
        ("siglip", {"size": {"height": 65, "width": 64}}, "give 64 x 65 pixels: the model takes 64 x 64"),
        ("siglip", {"do_resize": False}, "give 100 x 90 pixels: the model takes 64 x 64"),
        ("siglip", {"do_center_crop": True}, "do_center_crop needs crop_size"),
        ("siglip", {"size": {}}, "size must have shortest_edge, or height and width"),
        ("siglip", {"size": {"height": 3}}, "size must have shortest_edge, or height and width"),
        ("clip", {"do_center_crop": False}, "the model takes 224 x 224"),
        ("clip", {"crop_size": {"height": 9}}, "crop_size: width must be a whole number"),
        ("clip", {"rgba_background_color": "red"}, "rgba_background_color must be three whole numbers from 0 to 255"),
        ("clip", {"rgba_background_color": [0, 0, 256]}, "rgba_background_color must be three whole numbers"),
    ],
)
def test_an_option_that_is_not_possible_is_rejected_by_its_name(
    family: str, options: dict[str, Any], said: str, family_folder: Folder
) -> None:
    with pytest.raises(InvalidInput) as caught:
        reader(family_folder(family)).read(image(100, 90, **options))
    assert said in str(caught.value)
    assert caught.value.param == "mm_processor_kwargs"
    assert len(str(caught.value)) < 300


def test_an_option_cannot_make_an_image_larger_than_the_server_takes(family_folder: Folder) -> None:
    small = reader(family_folder("clip"), max_image_pixels=1_000_000)
    with pytest.raises(TooLarge, match="ask for 2400 x 1200 pixels: at most 1000000 are made") as caught:
        small.read(image(200, 100, size={"shortest_edge": 1200}))
    assert caught.value.param == "mm_processor_kwargs"


def test_an_image_that_fits_may_go_as_it_is(family_folder: Folder) -> None:
    qwen = reader(family_folder("qwen2-vl"))
    assert qwen.read(image(56, 84, do_resize=False)).grid == (6, 4)
    with pytest.raises(InvalidInput, match="may have at most 1200 patches"):
        qwen.read(image(28 * 20, 28 * 16, do_resize=False))
    with pytest.raises(InvalidInput, match="multiples of 28 pixels"):
        qwen.read(image(56, 85, do_resize=False))


def test_an_option_that_is_null_is_one_that_was_not_given(family_folder: Folder) -> None:
    qwen = reader(family_folder("qwen2-vl"))
    data = encode(drawing(400, 300))
    plain = qwen.read(Image(data))
    nulls = dict.fromkeys(("max_pixels", "min_pixels", "size", "do_resize", "rgba_background_color"))
    assert np.array_equal(qwen.read(Image(data, nulls)).values, plain.values)
    some, few = (qwen.read(Image(data, {"max_pixels": 5 * 784, **more})) for more in ({"min_pixels": None}, {}))
    assert some.grid == few.grid != plain.grid
    with pytest.raises(InvalidInput, match="'speed' is not known"):
        qwen.read(image(100, 90, speed=None))


def test_the_background_is_the_caller_s(family_folder: Folder) -> None:
    siglip = reader(family_folder("siglip"))
    data = encode(Pillow.new("RGBA", (10, 10)))
    for colour in ([0, 0, 0], (9, 8, 7)):
        values = siglip.read(Image(data, {"rgba_background_color": colour})).values
        assert values[:, 5, 5].tolist() == list(colour)
    assert (siglip.read(Image(data)).values == 255).all()


def test_a_processor_that_is_not_followed_takes_no_options_of_its_own(tmp_path: Path) -> None:
    SiglipImageProcessorPil(resample=1).save_pretrained(tmp_path)
    careful = reader(tmp_path)
    with pytest.raises(InvalidInput, match="this model knows rgba_background_color"):
        careful.read(image(10, 10, size={"height": 5, "width": 5}))
    assert careful.read(image(10, 10, rgba_background_color=[1, 2, 3])).values.size
