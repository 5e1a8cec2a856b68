"""From an encoded picture to its pixels: upright, RGB, and within limits that are looked at before anything is decoded.

What becomes of what a file may hold:

- Orientation (EXIF or XMP) is applied, as transformers does when it loads a picture. A damaged part counts as none.
- What is transparent is laid on white, or on the `background` of the options, as transformers 5 and vLLM do.
- What lies behind the end of a picture is not looked at: the video of a phone's photo, a gain map, a second picture.
- Palettes, grey, CMYK and YCbCr become RGB. Of 16 bits a channel the upper 8 are kept. Colour profiles are not applied.
- Of an animation the first frame is read; the others are never looked at, however many they are.
- A file that ends early or is damaged is refused, and so is one whose texts or profiles unpack to more than Pillow's
  limit of 1 MB each.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass
from typing import Final, TypeAlias

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from staged_pool.runtime.models.images.formats import Format, find_format
from staged_pool.runtime.models.images.jpeg import MAX_SEGMENTS, read_structure
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.images.transparent_colour import TransparentColour, find_transparent_colour
from staged_pool.stages.errors import TooLarge, UnsupportedMedia, UnusableMedia

Colour: TypeAlias = tuple[int, int, int]

WHITE: Final[Colour] = (255, 255, 255)

_BROKEN: Final = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, AttributeError,
                  RuntimeError, struct.error, zlib.error, Image.DecompressionBombError, Warning)  # fmt: skip
"""What Pillow raises on files that are damaged on purpose; warnings, where the host makes errors of them."""

_ORIENTATION: Final = 0x0112
"""The EXIF tag."""

_ORIENTED_PNG: Final = frozenset({"exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp"})
"""Where Pillow finds an orientation in a PNG: its own chunk, the text that ImageMagick writes, and XMP."""

_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture upright, by its orientation. 5 to 8 swap the edges."""

MAX_SCANS: Final = 100
"""Of one JPEG. Each goes over the whole picture, so that a small file of many is hours of work; real ones have about
ten. (libjpeg-turbo's own tools stop at such a number, its library does not.)"""

_STRIP_PIXELS: Final = 2**14
"""What is blended at a time: a fraction of a millisecond."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is decoded at most."""

    image_bytes: int
    pixels: int


class Encoded:
    """A picture whose header has been read, and nothing else.

    Raises:
        TooLarge: It is beyond a limit.
        UnsupportedMedia: It is in a format that is not read here.
        UnusableMedia: It is damaged.
    """

    def __init__(self, data: bytes, limits: Limits) -> None:
        if len(data) > limits.image_bytes:
            raise TooLarge(f"The picture has {len(data)} bytes: at most {limits.image_bytes} are taken.")
        self._format = find_format(data)
        if self._format == "WebP":
            # Its decoder takes memory for the whole picture as soon as it is opened.
            _check_pixels(_webp_size(data), limits)
        if self._format == "JPEG":
            _check_jpeg(data)
        try:
            # The class, not Image.open(): what that says of large pictures is a setting of the whole process.
            self._file = _opener(self._format)(io.BytesIO(data))
        except _BROKEN as error:
            raise _damaged(self._format) from error
        _check_pixels((self._file.height, self._file.width), limits)
        self._orientation = self._read_orientation() if self._format == "JPEG" else None
        self._clear: TransparentColour | None = None
        if isinstance(self._file, PngImageFile):
            self._clear = find_transparent_colour(self._file, data)

    @property
    def size(self) -> Size:
        """Height and width in pixels, upright; for formats other than JPEG, before it is made so."""
        width, height = self._file.size
        return (width, height) if (self._orientation or 1) >= 5 else (height, width)

    def shrink(self, size: Size) -> None:
        """Let the JPEG decoder leave out detail, if the picture stays at least so large. Other formats cannot."""
        if self._format == "JPEG":
            height, width = size
            self._file.draft(None, (height, width) if (self._orientation or 1) >= 5 else (width, height))

    def decode(self, background: Colour = WHITE) -> Image.Image:
        """The picture: RGB, upright. To be called once.

        Args:
            background: What is seen where the picture is transparent.

        Raises:
            UnusableMedia: The file is damaged.
        """
        try:
            self._file.load()
            orientation = self._read_orientation() if self._orientation is None else self._orientation
            picture = _as_rgb(self._file, background)
            if self._clear is not None:
                picture = picture.copy() if picture is self._file else picture
                self._clear.lay(picture, self._file, background)
            method = _UPRIGHT.get(orientation)
            return picture if method is None else picture.transpose(method)
        except _BROKEN as error:
            raise _damaged(self._format) from error

    def _read_orientation(self) -> int:
        if self._format == "PNG" and _ORIENTED_PNG.isdisjoint(self._file.info):
            return 1
        try:
            value = self._file.getexif().get(_ORIENTATION, 1)
        except _BROKEN:
            return 1
        return value if isinstance(value, int) else 1


def _opener(format: Format) -> type[ImageFile.ImageFile]:
    match format:
        case "JPEG":
            return JpegImageFile
        case "PNG":
            return PngImageFile
        case "WebP":
            return WebPImageFile
        case "GIF":
            return GifImageFile
        case "BMP":
            return BmpImageFile


def _as_rgb(picture: Image.Image, background: Colour) -> Image.Image:
    if picture.mode.startswith("I;16"):
        return picture.point(lambda value: value / 256, "L").convert("RGB")
    if "A" in picture.getbands() or "a" in picture.getbands() or picture.info.get("transparency") is not None:
        seen = picture.convert("RGBA")
        return _laid_on(background, seen)
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _laid_on(background: Colour, picture: Image.Image) -> Image.Image:
    # In strips: Pillow holds the interpreter's lock while it blends, for half a second where a camera's picture is
    # transparent.
    width, height = picture.size
    rows = max(1, _STRIP_PIXELS // width)
    below = Image.new("RGBA", (width, min(rows, height)), (*background, 255))
    laid = Image.new("RGB", picture.size)
    for top in range(0, height, rows):
        strip = picture.crop((0, top, width, min(top + rows, height)))
        under = below if strip.size == below.size else below.crop((0, 0, *strip.size))
        laid.paste(Image.alpha_composite(under, strip).convert("RGB"), (0, top))
    return laid


def _check_jpeg(data: bytes) -> None:
    found = read_structure(data)
    if found.segments > MAX_SEGMENTS:
        raise UnusableMedia(f"The picture is a JPEG of more than {MAX_SEGMENTS} segments: no more are read.")
    if found.scans > MAX_SCANS:
        raise UnusableMedia(f"The picture is a JPEG of {found.scans} scans: at most {MAX_SCANS} are read.")
    if found.bits not in (None, 8):
        raise UnsupportedMedia(f"The picture is a JPEG of {found.bits} bits a channel: those of 8 are read.")


def _check_pixels(size: Size, limits: Limits) -> None:
    height, width = size
    if height < 1 or width < 1:
        raise UnusableMedia(f"The picture is {width} x {height} pixels: it must have at least one.")
    if height * width > limits.pixels:
        raise TooLarge(
            f"The picture is {width} x {height} pixels, which are {height * width}: at most {limits.pixels} are taken."
        )


def _webp_size(data: bytes) -> Size:
    """Height and width of the canvas, from the first chunk (https://developers.google.com/speed/webp/docs/riff_container).

    Raises:
        UnusableMedia: The chunk is none of the three that a WebP begins with.
    """
    kind, head = data[12:16], data[20:30]
    if len(head) == 10:
        if kind == b"VP8X":
            return int.from_bytes(head[7:10], "little") + 1, int.from_bytes(head[4:7], "little") + 1
        if kind == b"VP8L" and head[0] == 0x2F:
            bits = int.from_bytes(head[1:5], "little")
            return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
        if kind == b"VP8 ":
            return int.from_bytes(head[8:10], "little") & 0x3FFF, int.from_bytes(head[6:8], "little") & 0x3FFF
    raise _damaged("WebP")


def _damaged(format: Format) -> UnusableMedia:
    return UnusableMedia(f"The picture is a {format} that cannot be decoded: the file is damaged or ends early.")
