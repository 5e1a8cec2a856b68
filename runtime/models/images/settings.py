"""Settings of a model folder's image processor, as transformers reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from staged_pool.runtime.models.images.numbers import (
    MOST_MADE,
    MOST_MERGED,
    MOST_TILES,
    finite,
    positive,
    resampling,
    three,
)
from staged_pool.runtime.models.images.scale import Layout, Scale
from staged_pool.runtime.models.images.sizes import (
    FixedSize,
    PatchBudget,
    PixelRange,
    Resize,
    ShortestEdge,
    Size,
    TileGrid,
)
from staged_pool.runtime.models.images.torchvision import needs_torchvision
from staged_pool.runtime.models.specs.json_file import MOST, MOST_PIXELS, JsonFile
from staged_pool.stages.errors import ConfigError

Resample: TypeAlias = Literal["bilinear", "bicubic"]

_RESAMPLES: Final[dict[int, Resample]] = {2: "bilinear", 3: "bicubic"}
"""Resampling filters that torch supports for bytes, by Pillow's number."""


_IN_ROWS: Final = "PaddleOCRVLImageProcessorPil"
"""Processor that puts patches in rows of the whole image, by name."""

_TILED: Final = ("Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil")
"""Processors that cut images into tiles, by name: transformers 5.4 lacks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Settings of one image processor.

    If `unknown` is set, its steps are not all known, and the processor of transformers runs instead of ours.
    """

    folder: Path
    processor: str
    """Name of the processor's class."""
    resize: Resize | None
    """Rule of resizing. None: images keep their size, or the rule is unknown."""
    resample: Resample | None
    """Resampling filter. None: another one."""
    crop: Size | None
    """Height and width of the center crop. A smaller image is padded with zeros. None: no crop."""
    patch_size: int | None = None
    """Edge of a patch or tile in pixels, for images of any shape. None: all images have one size."""
    merge_size: int = 1
    """Patches along one edge that become one token of a language model. `Pixels.grid` is a multiple of it."""
    scale: Scale
    custom_code: bool = False
    """True: the class is custom Python code of the folder."""
    unknown: str | None = None
    """Reason why our fast path cannot do the same. None: it can."""

    @property
    def temporal_patch_size(self) -> int:
        return self.scale.repeats

    @property
    def min_pixels(self) -> int | None:
        return self.resize.min_pixels if isinstance(self.resize, PixelRange) else None

    @property
    def max_pixels(self) -> int | None:
        return self.resize.max_pixels if isinstance(self.resize, PixelRange) else None

    @property
    def max_patches(self) -> int | None:
        """Most patches of one image, for models that take images of any shape."""
        match self.resize, self.patch_size:
            case PatchBudget() as budget, _:
                return budget.max_patches
            case PixelRange() as span, int(edge):
                return span.max_pixels // edge**2
            case _:
                return None

    def within(self, fewest: int, most: int) -> ImageSettings:
        """Return the settings with other limits on the pixels of an image."""
        if not isinstance(self.resize, PixelRange):
            return self
        return replace(self, resize=replace(self.resize, min_pixels=fewest, max_pixels=most))

    @property
    def shape(self) -> Size | None:
        """Height and width of every prepared image. None: they differ, or are unknown."""
        if self.patch_size is not None or self.unknown is not None:
            return None
        if self.crop is not None:
            return self.crop
        return (self.resize.height, self.resize.width) if isinstance(self.resize, FixedSize) else None


def load_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the image processor of a folder by transformers, on Pillow and numpy.

    Raises:
        ConfigError: It cannot be loaded.
    """
    # Imported from its module: some versions of transformers export it only if torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    from staged_pool.runtime.models.images.float_resize import CLASSES, FloatResizeProcessor

    file = _read(folder)
    if file.content.get("image_processor_type") in CLASSES:
        return FloatResizeProcessor(file)
    try:
        return AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError) as error:
        if trust_remote_code:
            raise _not_loaded(file, error) from error
        why = needs_torchvision(str(file.content.get("image_processor_type"))) or str(error)
        raise ConfigError(f"preprocessor_config.json: the image processor cannot be read: {why}") from error
    except (Exception, SystemExit) as error:
        if not trust_remote_code:
            raise
        raise _not_loaded(file, error) from error  # code of a model folder may raise anything


def _not_loaded(file: JsonFile, error: BaseException) -> ConfigError:
    return ConfigError(f"{_own_class(file)}: the folder's own image processor cannot be loaded: {error}")


def read_image_settings(folder: Path, *, trust_remote_code: bool = False) -> ImageSettings:
    """Read the settings of a folder's image processor.

    Args:
        folder: Has `preprocessor_config.json`, or `processor_config.json` with a part for images.
        trust_remote_code: Accept custom code of the folder as its image processor. It does not run here.

    Raises:
        ConfigError: There is no image processor, or it cannot be loaded; names the setting.
    """
    file = _read(folder)
    own_class = _own_class(file)
    if trust_remote_code and own_class is not None:
        return custom_code_settings(folder)
    processor = load_processor(folder, trust_remote_code=False)
    return _settings_of(folder, processor, file.name)


def custom_code_settings(folder: Path) -> ImageSettings:
    """Return settings for a folder's own image processor, whose steps are unknown."""
    name = _own_class(_read(folder)) or ""
    return replace(_not_understood(folder, name, "it is code of the model folder"), custom_code=True)


def _own_class(file: JsonFile) -> str | None:
    named = file.get("auto_map", dict, {}).get("AutoImageProcessor")
    if isinstance(named, list):  # one class for Pillow, one for torchvision
        named = next((name for name in named if name is not None), None)
    return None if named is None else str(named)


def _read(folder: Path) -> JsonFile:
    """Read the image part of the folder's files, in transformers' order."""
    both = JsonFile.read(folder / "processor_config.json", root=folder)
    if both is not None and (nested := both.get("image_processor", dict, None)) is not None:
        return JsonFile(f"{both.name}: image_processor", nested)
    file = JsonFile.read(folder / "preprocessor_config.json", root=folder)
    if file is None:
        raise ConfigError("preprocessor_config.json is missing: the model has no settings for its images")
    return file


def _settings_of(folder: Path, processor: Any, name: str) -> ImageSettings:
    from transformers.image_processing_backends import PilBackend
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    from staged_pool.runtime.models.images.float_resize import FloatResizeProcessor

    kind = type(processor)
    # A class with its own method for a step changes that step. The others differ only in their defaults.
    if kind is Qwen2VLImageProcessorPil:
        return _qwen(folder, processor, name)
    if kind is Siglip2ImageProcessorPil:
        return _naflex(folder, processor, name)
    if kind.__name__ in _TILED and kind.__module__.startswith("transformers."):
        return _tiled(folder, processor, name)
    if kind.__name__ == _IN_ROWS and kind.__module__.startswith("transformers."):
        unread = _not_understood(folder, kind.__name__, "it puts patches in rows of the whole image")
        return replace(unread, merge_size=processor.merge_size, scale=replace(unread.scale, layout="channels first"))
    if kind is FloatResizeProcessor:
        return _not_understood(folder, kind.__name__, "it resizes in floating point")
    steps = ("preprocess", "_preprocess", "resize", "center_crop", "rescale", "normalize", "process_image",
             "_preprocess_image_like_inputs", "_standardize_kwargs", "convert_to_rgb")  # fmt: skip
    if isinstance(processor, PilBackend) and all(_same(kind, PilBackend, step) for step in steps):
        return _fixed(folder, processor, name)
    return _not_understood(folder, kind.__name__, f"{kind.__name__} is not one of the known classes")


def _same(kind: type, base: type, method: str) -> bool:
    # Some classes redefine `preprocess` only to document it. If it changes images, the comparison at load finds that.
    return method == "preprocess" or getattr(kind, method) is getattr(base, method)


def _fixed(folder: Path, processor: Any, name: str) -> ImageSettings:
    unknown: list[str] = []
    resize: Resize | None = None
    if processor.do_resize:
        given = {key: value for key, value in dict(processor.size or {}).items() if value is not None}
        match given:
            case {"height": int(height), "width": int(width)} if len(given) == 2 and min(height, width) > 0:
                resize = FixedSize(positive(height, "size: height", name), positive(width, "size: width", name))
            case {"shortest_edge": int(shortest)} if len(given) == 1 and shortest > 0:
                resize = ShortestEdge(positive(shortest, "size: shortest_edge", name))
            case _:
                unknown.append(f"size has {', '.join(sorted(given)) or 'nothing'}")
    crop = None
    if getattr(processor, "do_center_crop", None):
        given = dict(processor.crop_size or {})
        crop = positive(given.get("height"), "crop_size", name), positive(given.get("width"), "crop_size", name)
    if getattr(processor, "do_pad", None):
        unknown.append("do_pad is set")
    return _settings(folder, processor, unknown, resize=resize, crop=crop, scale=_scale(processor, name))


def _qwen(folder: Path, processor: Any, name: str) -> ImageSettings:
    patch, merge, repeats = (
        positive(getattr(processor, field), field, name, most)
        for field, most in (
            ("patch_size", MOST_PIXELS),
            ("merge_size", MOST_MERGED),
            ("temporal_patch_size", MOST_MERGED),
        )
    )
    size = dict(processor.size)
    low, high = (
        positive(size.get(field), f"size: {field}", name, most)
        for field, most in (("shortest_edge", MOST_MADE), ("longest_edge", MOST))
    )
    return _settings(
        folder,
        processor,
        [] if processor.do_resize else ["do_resize is off"],
        resize=PixelRange(patch * merge, low, high),
        scale=_scale(processor, name, layout="channels first", repeats=repeats),
        patch_size=patch,
        merge_size=merge,
    )


def _naflex(folder: Path, processor: Any, name: str) -> ImageSettings:
    patch = positive(processor.patch_size, "patch_size", name)
    most = positive(processor.max_num_patches, "max_num_patches", name, MOST_MADE // patch**2)
    return _settings(
        folder,
        processor,
        [] if processor.do_resize else ["do_resize is off"],
        resize=PatchBudget(patch, most),
        scale=_scale(processor, name, layout="channels last"),
        patch_size=patch,
    )


def _tiled(folder: Path, processor: Any, name: str) -> ImageSettings:
    tile = positive(dict(processor.max_image_size).get("longest_edge"), "max_image_size: longest_edge", name)
    given = {key: value for key, value in dict(processor.size or {}).items() if value is not None}
    unknown = [] if given.keys() == {"longest_edge"} else [f"size has {', '.join(sorted(given)) or 'nothing'}"]
    resizes = processor.do_resize and not unknown
    longest = positive(given["longest_edge"], "size: longest_edge", name, MOST_TILES * tile) if resizes else 0
    resample = resampling(processor.resample, name, usual=1)
    return ImageSettings(
        folder=folder,
        processor=type(processor).__name__,
        resize=TileGrid(longest, tile, bool(processor.do_image_splitting), resample),
        resample=None,
        crop=None,
        patch_size=tile,
        scale=_scale(processor, name, layout="tiles"),
        unknown="; ".join(unknown) or None,
    )


def _settings(
    folder: Path,
    processor: Any,
    unknown: list[str],
    *,
    resize: Resize | None,
    scale: Scale,
    crop: Size | None = None,
    patch_size: int | None = None,
    merge_size: int = 1,
) -> ImageSettings:
    filter_number = resampling(processor.resample, "preprocessor_config.json", usual=2)
    resample = _RESAMPLES.get(filter_number)
    if resize is not None and resample is None:
        unknown = [*unknown, f"resample={filter_number} is neither bilinear (2) nor bicubic (3)"]
    return ImageSettings(
        folder=folder,
        processor=type(processor).__name__,
        resize=resize,
        resample=resample,
        crop=crop,
        patch_size=patch_size,
        merge_size=merge_size,
        scale=scale,
        unknown="; ".join(unknown) or None,
    )


def _not_understood(folder: Path, processor: str, why: str) -> ImageSettings:
    one = (1.0, 1.0, 1.0)
    return ImageSettings(
        folder=folder,
        processor=processor,
        resize=None,
        resample=None,
        crop=None,
        scale=Scale(one, (0.0, 0.0, 0.0)),
        unknown=why,
    )


def _scale(processor: Any, name: str, layout: Layout = "planes", repeats: int = 1) -> Scale:
    rescale = finite(processor.rescale_factor, "rescale_factor", name) if processor.do_rescale else 1.0
    if not rescale:
        raise ConfigError(f"{name}: rescale_factor must not be 0")
    if not processor.do_normalize:
        return Scale((rescale,) * 3, (0.0, 0.0, 0.0), layout, repeats)
    mean, std = (three(getattr(processor, field), field, name) for field in ("image_mean", "image_std"))
    if 0.0 in std:
        raise ConfigError(f"{name}: image_std must not be 0")
    first, second, third = ((rescale / s, -m / s) for m, s in zip(mean, std, strict=True))
    return Scale((first[0], second[0], third[0]), (first[1], second[1], third[1]), layout, repeats)
