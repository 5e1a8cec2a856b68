"""Images as every family of models wants them, beside transformers' own for the same files."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from staged_pool.runtime.models.images.decode import Encoded
from staged_pool.runtime.models.images.open_reader import open_reader
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.models.images.to_device import to_device
from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.requests import Image
from tests.models.images.drawing import ALONE, FAMILIES, Folder, drawing, encode, image, pixels, reader

SIZES = [(640, 480), (333, 517), (47, 61), (61, 47), (90, 700), (700, 90), (224, 224), (1280, 720), (1, 1), (3, 200)]
"""Widths and heights: larger and smaller than the models', upright and lying, and hardly any image at all."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "qwen2-vl": [{"max_pixels": 20 * 784}, {"min_pixels": 290 * 784}],
    "siglip2-naflex": [{"max_num_patches": 9}],
}


def scaled(prepared: Pixels, reader: ImageReader) -> Tensor:
    return to_device([prepared], reader.scale, "cpu", torch.float32)


def by_transformers(folder: Path, data: bytes, **arguments: Any) -> Tensor:
    """Return the output of the folder's processor for a file, without padding."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = processor(images=Pillow.open(io.BytesIO(data)), return_tensors="pt", **arguments)
    values: Tensor = made["pixel_values"]
    if "spatial_shapes" in made:
        values = values[0, : int(made["spatial_shapes"][0].prod())]
    return values


def steps(found: Tensor, wanted: Tensor, reader: ImageReader) -> float:
    """The largest difference, in steps of one of 255."""
    assert found.shape == wanted.shape
    return float((found - wanted).abs().max()) / max(reader.scale.factor)


@pytest.mark.parametrize("family", FAMILIES)
def test_fast_pixels_are_those_of_transformers_up_to_two_steps_of_255(family: str, family_folder: Folder) -> None:
    folder = family_folder(family)
    fast = reader(folder)
    assert (fast.path, fast.reason) == ("fast", None)
    for size in SIZES:
        given = image(*size)
        assert isinstance(given.source, bytes)
        prepared = fast.read(given)
        assert prepared.values.dtype == np.uint8
        wanted = by_transformers(folder, given.source)
        found = scaled(prepared, fast)
        assert steps(found, wanted, fast) <= 2.1, size
        assert float((found - wanted).abs().mean()) / max(fast.scale.factor) < 0.05, size


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_pixels_are_those_of_transformers(family: str, family_folder: Folder) -> None:
    folder = family_folder(family)
    exact = reader(folder, image_path="exact")
    assert (exact.path, exact.reason) == ("exact", "image_path=exact")
    for size in SIZES[:6]:
        given = image(*size, format="JPEG")
        assert isinstance(given.source, bytes)
        prepared = exact.read(given)
        assert prepared.values.dtype == np.float32
        assert torch.equal(scaled(prepared, exact), by_transformers(folder, given.source)), size


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK"])
def test_files_of_every_mode_look_as_they_do_to_transformers(mode: str, family_folder: Folder) -> None:
    folder = family_folder("qwen2-vl")
    source = drawing(150, 100)
    if mode in ("RGBA", "LA"):
        source.putalpha(drawing(150, 100, 1).convert("L"))
    converted = source.convert(mode)
    data = encode(converted, "JPEG" if mode == "CMYK" else "PNG", **({"transparency": 3} if mode == "P" else {}))
    fast = reader(folder)
    assert steps(scaled(fast.read(Image(data)), fast), by_transformers(folder, data), fast) <= 2.1


@pytest.mark.parametrize("family", FAMILIES)
def test_both_paths_say_the_same_of_an_image_s_shape(family: str, family_folder: Folder) -> None:
    fast, exact = reader(family_folder(family)), reader(family_folder(family), image_path="exact")
    for size in SIZES:
        ours, theirs = fast.read(image(*size)), exact.read(image(*size))
        assert ours.grid == theirs.grid
        assert ours.values.shape == theirs.values.shape
        if fast.settings.shape is not None:
            assert ours.values.shape == (3, *fast.settings.shape)
        if ours.grid is not None:
            assert len(ours.values) == ours.grid[0] * ours.grid[1]
            assert len(ours.values) <= (fast.settings.max_patches or 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("path", ["fast", "exact"])
def test_how_many_patches_an_image_has_is_known_before_it_is_decoded(
    family: str, path: str, family_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = reader(family_folder(family), image_path=path)
    lying = Pillow.Exif()
    lying[0x0112] = 6
    given = [image(*size) for size in SIZES]
    given += [Image(encode(drawing(300, 200), kind, exif=lying)) for kind in ("JPEG", "PNG", "WEBP")]
    given += [Image(encode(drawing(300, 200)), options) for options in OPTIONS.get(family, ())]
    wanted = [ours.read(one).patches for one in given]
    assert (None in wanted) == (ours.settings.patch_size is None)
    if path == "fast":
        monkeypatch.setattr(Encoded, "decode", None)
    assert [ours.patches(one) for one in given] == wanted


def test_an_image_travels_as_a_byte_a_value_without_the_copies_of_a_film(family_folder: Folder) -> None:
    prepared = reader(family_folder("qwen2-vl")).read(image(640, 480))
    assert prepared.grid is not None
    assert prepared.values.nbytes == prepared.grid[0] * prepared.grid[1] * 3 * 14 * 14
    assert prepared.values.base is None or not isinstance(prepared.values.base, np.ndarray)


def test_images_of_both_paths_go_to_the_device_together(family_folder: Folder) -> None:
    for family in ("clip", "qwen2-vl", "siglip2-naflex"):
        fast, exact = reader(family_folder(family)), reader(family_folder(family), image_path="exact")
        several = [fast.read(image(50, 40)), exact.read(image(90, 40, 1)), fast.read(image(90, 140, 2))]
        together = to_device(several, fast.scale, "cpu", torch.float32)
        apart = torch.cat([scaled(one, fast) for one in several])
        assert torch.equal(together, apart)
        assert to_device(several, fast.scale, "cpu", torch.bfloat16).dtype == torch.bfloat16


def test_an_image_above_sixteen_megabytes_is_read_like_a_small_one(family_folder: Folder) -> None:
    # Pillow keeps it in several pieces of memory, and it is neither a multiple of them nor of a strip.
    folder = family_folder("vit")
    fast = reader(folder)
    values = np.kron(pixels(173, 127), np.ones((17, 19, 1), dtype=np.uint8))
    data = encode(Pillow.fromarray(values), "PNG", compress_level=1)
    assert values.shape[0] * values.shape[1] * 4 > 16 * 2**20
    assert steps(scaled(fast.read(Image(data)), fast), by_transformers(folder, data), fast) <= 2.1


def test_prepared_pixels_outlive_the_image_they_were_made_of(family_folder: Folder) -> None:
    folder = family_folder("siglip")
    fast = reader(folder)
    same_size = [image(64, 64, seed) for seed in range(30)]  # not resized: the result might be Pillow's memory
    prepared = [fast.read(given) for given in same_size]
    for seed, one in enumerate(prepared):
        assert np.array_equal(one.values, pixels(64, 64, seed).transpose(2, 0, 1))


def test_threads_that_read_at_once_get_their_own_images(family_folder: Folder) -> None:
    for family in ("clip", "qwen2-vl"):
        fast = reader(family_folder(family))
        given = [image(40 + 7 * k, 150 - 3 * k, k, "JPEG") for k in range(24)]
        alone = [fast.read(one).values for one in given]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(fast.read, given * 4))
        assert all(np.array_equal(one.values, alone[k % 24]) for k, one in enumerate(together))


def test_a_reading_thread_uses_one_core_and_leaves_the_other_threads_theirs(family_folder: Folder) -> None:
    found: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        fast = reader(family_folder("clip"))

        def read() -> None:
            fast.read(image(300, 200))
            found.append(torch.get_num_threads())

        thread = Thread(target=read)
        thread.start()
        thread.join()
        assert found == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        (partial(CLIPImageProcessorPil, resample=1), "resample=1"),
        (partial(CLIPImageProcessorPil, do_pad=True, pad_size={"height": 300, "width": 300}), "do_pad"),
        (partial(SiglipImageProcessorPil, size={"shortest_edge": 40, "longest_edge": 60}), "longest_edge"),
        pytest.param(partial(Qwen2VLImageProcessorPil, do_resize=False), "do_resize", marks=ALONE),
    ],
)
def test_what_is_not_followed_takes_the_exact_path_and_says_why(
    processor: Callable[[], Any], reason: str, tmp_path: Path, logged: list[structlog.typing.EventDict]
) -> None:
    processor().save_pretrained(tmp_path)
    careful = reader(tmp_path)
    assert careful.path == "exact"
    assert reason in str(careful.reason)
    assert [(event["event"], event["reason"]) for event in logged] == [("images.exact", careful.reason)]
    given = image(112, 84)
    assert isinstance(given.source, bytes)
    assert torch.equal(scaled(careful.read(given), careful), by_transformers(tmp_path, given.source))


def test_a_processor_that_gives_something_else_is_found_out_at_load(
    family_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = read_image_settings(family_folder("siglip"))
    normalize = SiglipImageProcessorPil.normalize
    monkeypatch.setattr(
        SiglipImageProcessorPil, "normalize", lambda self, image, mean, std: normalize(self, image[::-1], mean, std)
    )
    from staged_pool.runtime.config import EngineConfig

    assert "values differ" in str(open_reader(settings, EngineConfig()).reason)


def test_values_that_are_not_brought_to_a_scale_stay_as_they_are(tmp_path: Path) -> None:
    SiglipImageProcessorPil(do_rescale=False, do_normalize=False, size={"height": 20, "width": 30}).save_pretrained(
        tmp_path
    )
    plain = reader(tmp_path)
    assert plain.path == "fast"
    assert torch.equal(
        scaled(plain.read(image(30, 20)), plain)[0], torch.from_numpy(pixels(30, 20)).permute(2, 0, 1).float()
    )


def test_a_draft_is_taken_only_where_less_than_half_is_wanted(family_folder: Folder) -> None:
    sharp, draft = reader(family_folder("clip")), reader(family_folder("clip"), image_draft=True)

    def distance(width: int, height: int) -> float:
        given = image(width, height, format="JPEG")
        return float(np.abs(sharp.read(given).values.astype(int) - draft.read(given).values).mean())

    assert distance(440, 440) == 0
    assert 0 < distance(1200, 900) < 8
    upright = encode(drawing(1200, 600), "JPEG", exif=_turned())
    there, here = (one.read(Image(upright)).values.astype(int) for one in (sharp, draft))
    assert 0 < np.abs(there - here).mean() < 8


def _turned() -> Any:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    return exif
