"""Settings of a folder's image processor that are read, and those that are rejected."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.models.images.sizes import FixedSize, PatchBudget, PixelRange, ShortestEdge
from staged_pool.stages.errors import ConfigError
from tests.models.images.drawing import ALONE, Folder, reader, save_settings
from tests.needed import is_older

CLIP = {"image_processor_type": "CLIPImageProcessor"}
QWEN = {"image_processor_type": "Qwen2VLImageProcessor"}


def rejection(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_image_settings(folder)
    return str(caught.value)


def test_settings_of_the_families_are_read(family_folder: Folder) -> None:
    clip = read_image_settings(family_folder("clip"))
    assert (clip.processor, clip.resize, clip.crop) == ("CLIPImageProcessorPil", ShortestEdge(224), (224, 224))
    assert (clip.resample, clip.shape, clip.patch_size) == ("bicubic", (224, 224), None)
    assert clip.scale.factor == pytest.approx([1 / 255 / std for std in (0.26862954, 0.26130258, 0.27577711)])
    assert clip.scale.bias[0] == pytest.approx(-0.48145466 / 0.26862954)
    vit = read_image_settings(family_folder("vit"))
    assert (vit.resize, vit.resample, vit.shape) == (FixedSize(48, 32), "bilinear", (48, 32))
    qwen = read_image_settings(family_folder("qwen2-vl"))
    assert qwen.resize == PixelRange(28, 4 * 784, 300 * 784)
    assert (qwen.patch_size, qwen.merge_size, qwen.temporal_patch_size) == (14, 2, 2)
    assert (qwen.min_pixels, qwen.max_pixels, qwen.max_patches) == (4 * 784, 300 * 784, 1200)
    assert (qwen.scale.layout, qwen.shape) == ("channels first", None)
    naflex = read_image_settings(family_folder("siglip2-naflex"))
    assert naflex.resize == PatchBudget(16, 100)
    assert (naflex.max_patches, naflex.merge_size, naflex.scale.layout) == (100, 1, "channels last")
    assert all(settings.unknown is None for settings in (clip, vit, qwen, naflex))


@pytest.mark.parametrize(
    "settings",
    [
        {**CLIP, "size": 336, "crop_size": 336},
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": {"shortest_edge": 336}, "crop_size": 336},
        {"image_processor_type": "CLIPImageProcessorFast", "size": {"shortest_edge": 336}, "crop_size": [336, 336]},
    ],
)
def test_older_ways_of_saying_it_are_understood(settings: dict[str, Any], tmp_path: Path) -> None:
    read = read_image_settings(save_settings(tmp_path, **settings))
    assert (read.resize, read.shape) == (ShortestEdge(336), (336, 336))
    assert reader(tmp_path).path == "fast"


def test_the_part_for_images_of_a_newer_file_goes_before_the_older_file(tmp_path: Path) -> None:
    save_settings(tmp_path, **CLIP)
    both = {
        "image_processor": {**CLIP, "crop_size": 96, "size": {"shortest_edge": 96}},
        "processor_class": "CLIPProcessor",
    }
    (tmp_path / "processor_config.json").write_text(json.dumps(both))
    assert read_image_settings(tmp_path).shape == (96, 96)
    (tmp_path / "preprocessor_config.json").unlink()
    assert read_image_settings(tmp_path).shape == (96, 96)


@ALONE
def test_pixels_of_an_older_qwen_folder_are_read(tmp_path: Path) -> None:
    save_settings(tmp_path, image_processor_type="Qwen2VLImageProcessor", min_pixels=3136, max_pixels=12845056)
    qwen = read_image_settings(tmp_path)
    assert (qwen.min_pixels, qwen.max_pixels) == (3136, 12845056)


@ALONE
def test_a_processor_that_is_not_known_here_runs_as_transformers_has_it(tmp_path: Path) -> None:
    save_settings(tmp_path, image_processor_type="ConvNextImageProcessor", size={"shortest_edge": 64})
    settings = read_image_settings(tmp_path)
    assert settings.unknown == "ConvNextImageProcessorPil is not one of the known classes"
    assert settings.shape is None


@ALONE
def test_a_processor_that_fails_on_a_plain_image_is_rejected_at_load(tmp_path: Path) -> None:
    save_settings(tmp_path, image_processor_type="Qwen2VLImageProcessor", patch_size=15, do_resize=False)
    with pytest.raises(ConfigError, match="Qwen2VLImageProcessorPil cannot prepare an image: cannot reshape"):
        reader(tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"image_processor_type": "NoSuchImageProcessor"},
            "preprocessor_config.json: the image processor cannot be read",
        ),
        ({}, "preprocessor_config.json: the image processor cannot be read"),
        ({**CLIP, "size": "large"}, "preprocessor_config.json"),
        ({**CLIP, "crop_size": {"height": 0, "width": 9}}, "crop_size must be a whole number from 1 to 8192"),
        ({**CLIP, "image_std": [0.0, 1.0, 1.0]}, "image_std must not be 0"),
        ({**CLIP, "image_mean": [0.5, 0.5]}, "image_mean must be three numbers"),
        ({**CLIP, "image_mean": "grey"}, "image_mean='grey' must be a finite number"),
        ({**CLIP, "auto_map": 3}, "auto_map=3 must be of type dict"),
        pytest.param({**QWEN, "patch_size": 0}, "patch_size must be a whole number", marks=ALONE),
        pytest.param({**QWEN, "max_pixels": -4}, "longest_edge must be a whole number", marks=ALONE),
        pytest.param(
            {"image_processor_type": "Siglip2ImageProcessor", "max_num_patches": "many"},
            "max_num_patches must be",
            marks=ALONE,
        ),
    ],
)
def test_a_setting_that_cannot_be_read_is_rejected_by_its_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in rejection(save_settings(tmp_path, **settings))


@pytest.mark.parametrize("name", ["Qwen2VLImageProcessor", "Siglip2ImageProcessorFast", "ConvNextImageProcessor"])
def test_a_class_is_read_or_said_to_want_torchvision(name: str, tmp_path: Path) -> None:
    save_settings(tmp_path, image_processor_type=name)
    own = name.removesuffix("Fast")
    if is_older("transformers", "5.5") and find_spec("torchvision") is None:
        said = f"has {own} only with torchvision, which is not installed; 5.5 and newer have most classes without it"
        assert rejection(tmp_path).endswith(said)
    else:
        assert read_image_settings(tmp_path).processor == f"{own}Pil"


def test_a_folder_without_an_image_processor_is_rejected(tmp_path: Path) -> None:
    assert rejection(tmp_path).startswith("preprocessor_config.json is missing")
    (tmp_path / "preprocessor_config.json").write_text("{")
    assert rejection(tmp_path).startswith("preprocessor_config.json: cannot be read as JSON")
    (tmp_path / "preprocessor_config.json").write_text("[]")
    assert rejection(tmp_path) == "preprocessor_config.json: must hold an object"
