"""Image options of a request, and their limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from staged_pool.runtime.models.images.cache import content_key
from staged_pool.runtime.models.images.decode import WHITE, Colour
from staged_pool.runtime.models.images.settings import ImageSettings
from staged_pool.runtime.models.images.sizes import (
    FixedSize,
    PatchBudget,
    PixelRange,
    ShortestEdge,
    Size,
    TileGrid,
    check_aspect,
)
from staged_pool.stages.errors import InvalidInput, InvalidSetting, TooLarge, shortened

PARAM: Final = "mm_processor_kwargs"
"""Name of the image options in requests."""

_BACKGROUND: Final = "rgba_background_color"

_FIXED: Final = ("do_center_crop", "do_resize", "size", "crop_size")
_RANGE: Final = ("do_resize", "max_pixels", "min_pixels", "size")
_BUDGET: Final = ("do_resize", "max_num_patches")
_TILES: Final = ("do_image_splitting", "size")


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Settings, background and processor arguments for one image."""

    settings: ImageSettings
    background: Colour
    arguments: Mapping[str, object]
    """The same settings as arguments of the image processor of transformers."""

    def key(self, data: bytes) -> bytes:
        """Return a hash of an image's bytes and of its options."""
        return content_key(data, {**self.arguments, _BACKGROUND: self.background})

    def target(self, size: Size) -> Size:
        """Return the height and width that an image is resized to.

        Raises:
            UnusableMedia: One edge is too long for the other.
        """
        resize = self.settings.resize
        if resize is not None:
            return resize.of(size)
        if self.settings.unknown is not None:
            check_aspect(size)  # an unknown processor may resize the shorter edge to a fixed length
        return size


class OptionsReader:
    """Reads the image options of requests for one model.

    The names are those of transformers' image processors. Options that ask for more pixels or patches than the folder's
    settings are rejected: the operator chose to serve those.

    Args:
        settings: Settings of the folder.
        max_pixels: Most pixels of a resized image, before it is cropped.
    """

    def __init__(self, settings: ImageSettings, max_pixels: int) -> None:
        self._settings = settings
        self._max_pixels = max_pixels
        self._plain = ImageOptions(settings, WHITE, {})
        known: tuple[str, ...] = ()
        if settings.unknown is None:
            match settings.resize:
                case PixelRange():
                    known = _RANGE
                case PatchBudget():
                    known = _BUDGET
                case TileGrid():
                    known = _TILES
                case _:
                    known = _FIXED
        self.known = (*known, _BACKGROUND)

    def read(self, options: Mapping[str, object]) -> ImageOptions:
        """Check the options of an image, and combine them with the folder's settings.

        An option that is None is one that was not given.

        Raises:
            InvalidSetting: An option is unknown to this model, or its value is invalid; names it.
        """
        if not options:
            return self._plain
        for name in options:
            if name not in self.known:
                raise _invalid_option(
                    f"The image option {shortened(name)!r} is not known: this model knows {', '.join(self.known)}."
                )
        options = {name: value for name, value in options.items() if value is not None}
        background = _colour(options[_BACKGROUND]) if _BACKGROUND in options else WHITE
        if options.keys() <= {_BACKGROUND}:
            return replace(self._plain, background=background)
        resize = self._settings.resize
        if isinstance(resize, PixelRange):
            settings, arguments = self._range(resize, options)
        elif isinstance(resize, PatchBudget):
            settings, arguments = self._budget(resize, options)
        elif isinstance(resize, TileGrid):
            settings, arguments = self._tiles(resize, options)
        else:
            settings, arguments = self._fixed(options)
        return ImageOptions(settings, background, arguments)

    def check(self, options: ImageOptions, size: Size) -> Size:
        """Compute the size that an image is resized to, and check it.

        Args:
            options: The result of `read`.
            size: Height and width of the image.

        Raises:
            UnusableMedia: One edge is too long for the other.
            InvalidInput: The model does not take the image with these options.
        """
        target = options.target(size)
        if options.settings is self._settings:
            return target
        if target[0] * target[1] > self._max_pixels:
            raise TooLarge(
                f"The image options ask for {target[1]} x {target[0]} pixels: at most {self._max_pixels} are made.",
                param=PARAM,
            )
        settings = options.settings
        if settings.patch_size is None:
            made, wanted = settings.crop or target, self._settings.shape
            if wanted is not None and made != wanted:
                raise _unfit_image(
                    f"The image options give {made[1]} x {made[0]} pixels: the model takes {wanted[1]} x {wanted[0]}."
                )
        elif settings.resize is None:
            block = settings.patch_size * settings.merge_size
            most = self._settings.max_patches or 0
            if target[0] % block or target[1] % block:
                raise _unfit_image(f"Without do_resize the edges of an image must be multiples of {block} pixels.")
            if (target[0] // settings.patch_size) * (target[1] // settings.patch_size) > most:
                raise _unfit_image(f"Without do_resize an image may have at most {most} patches.")
        return target

    def _range(self, folder: PixelRange, options: Mapping[str, object]) -> tuple[ImageSettings, dict[str, object]]:
        given = dict(_mapping(options, "size", ("shortest_edge", "longest_edge")))
        for name, key in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if name in options:
                given[key] = options[name]
        high = _whole(given.get("longest_edge", folder.max_pixels), "max_pixels", folder.max_pixels)
        low = _whole(given.get("shortest_edge", min(folder.min_pixels, high)), "min_pixels", high)
        resize = replace(folder, min_pixels=low, max_pixels=high) if _flag(options, "do_resize", True) else None
        return replace(self._settings, resize=resize), {
            "do_resize": resize is not None,
            "size": {"shortest_edge": low, "longest_edge": high},
        }

    def _budget(self, folder: PatchBudget, options: Mapping[str, object]) -> tuple[ImageSettings, dict[str, object]]:
        most = _whole(options.get("max_num_patches", folder.max_patches), "max_num_patches", folder.max_patches)
        resize = replace(folder, max_patches=most) if _flag(options, "do_resize", True) else None
        return replace(self._settings, resize=resize), {
            "do_resize": resize is not None,
            "max_num_patches": most if resize else folder.max_patches,
        }

    def _tiles(self, folder: TileGrid, options: Mapping[str, object]) -> tuple[ImageSettings, dict[str, object]]:
        longest = folder.longest
        if "size" in options:
            if not longest:
                raise _invalid_option("The image option size is not known: the model keeps the size of images.")
            given = _mapping(options, "size", ("longest_edge",))
            longest = _whole(given.get("longest_edge"), "size: longest_edge", folder.longest)
        cuts = _flag(options, "do_image_splitting", folder.cuts)
        if cuts and not folder.cuts:
            raise _invalid_option("The image option do_image_splitting must be false: the model cuts no images.")
        resize = replace(folder, longest=longest, cuts=cuts)
        return replace(self._settings, resize=resize), {
            "do_image_splitting": cuts,
            **({"size": {"longest_edge": longest}} if longest else {}),
        }

    def _fixed(self, options: Mapping[str, object]) -> tuple[ImageSettings, dict[str, object]]:
        folder = self._settings
        arguments: dict[str, object] = {}
        resize = folder.resize
        assert resize is None or isinstance(resize, ShortestEdge | FixedSize)
        if "size" in options:
            match _mapping(options, "size", ("shortest_edge", "height", "width")):
                case {"shortest_edge": value, **rest} if not rest:
                    resize = ShortestEdge(_whole(value, "size: shortest_edge", self._max_pixels))
                case {"height": tall, "width": wide, **rest} if not rest:
                    resize = FixedSize(
                        _whole(tall, "size: height", self._max_pixels), _whole(wide, "size: width", self._max_pixels)
                    )
                case _:
                    raise _invalid_option("The image option size must have shortest_edge, or height and width.")
        if not _flag(options, "do_resize", resize is not None):
            resize = None
        match resize:
            case ShortestEdge(shortest):
                arguments |= {"do_resize": True, "size": {"shortest_edge": shortest}}
            case FixedSize(height, width):
                arguments |= {"do_resize": True, "size": {"height": height, "width": width}}
            case None:
                if _flag(options, "do_resize", False):
                    raise _invalid_option("The image option do_resize needs size: the model has none of its own.")
                arguments["do_resize"] = False
        crop = self._crop(options)
        arguments["do_center_crop"] = crop is not None
        if crop is not None:
            arguments["crop_size"] = {"height": crop[0], "width": crop[1]}
        return replace(folder, resize=resize, crop=crop, resample=folder.resample or "bilinear"), arguments

    def _crop(self, options: Mapping[str, object]) -> Size | None:
        crop = self._settings.crop
        if "crop_size" in options:
            given = _mapping(options, "crop_size", ("height", "width"))
            tall, wide = (_whole(given.get(name), f"crop_size: {name}", 1 << 14) for name in ("height", "width"))
            crop = tall, wide
        if not _flag(options, "do_center_crop", self._settings.crop is not None):
            return None
        if crop is None:
            raise _invalid_option("The image option do_center_crop needs crop_size: the model has none of its own.")
        return crop


def _invalid_option(message: str) -> InvalidSetting:
    return InvalidSetting(message, param=PARAM)


def _unfit_image(message: str) -> InvalidInput:
    """Return an error about one image: the same options may fit others."""
    return InvalidInput(message, param=PARAM)


def _mapping(options: Mapping[str, object], name: str, keys: tuple[str, ...]) -> Mapping[str, object]:
    given = options.get(name, {})
    if not isinstance(given, Mapping) or not given.keys() <= set(keys):
        raise _invalid_option(f"The image option {name} must be an object with no other fields than {', '.join(keys)}.")
    return given


def _flag(options: Mapping[str, object], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise _invalid_option(f"The image option {name} must be true or false.")
    return value


def _whole(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _invalid_option(f"The image option {name} must be a whole number from 1 to {most}.")
    return value


def _colour(value: object) -> Colour:
    match value:
        case [int() as red, int() as green, int() as blue] if all(
            not isinstance(part, bool) and 0 <= part <= 255 for part in (red, green, blue)
        ):
            return red, green, blue
    raise _invalid_option(f"The image option {_BACKGROUND} must be three whole numbers from 0 to 255.")
