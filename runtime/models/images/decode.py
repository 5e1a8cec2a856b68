"""Decoder of images to upright RGB, with limits that are checked before any pixel.

Treatment of the contents of a file:

- Orientation (EXIF or XMP) is applied, as transformers does when it loads an image. A damaged entry counts as none.
- Transparent pixels are blended with white, or with the `background` of the options, as in transformers 5 and vLLM.
- Data after the end of an image is ignored: the video of a phone's photo, a gain map, a second image.
- Palettes, grey, CMYK and YCbCr become RGB. Of 16 bits a channel, the upper 8 are kept. Colour profiles are ignored.
- The first frame of an animation is read, and all others are ignored.
- A file that ends early or is damaged is rejected. So is one with a text or profile that unpacks to more than Pillow's
  limit of 1 MB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from staged_pool.runtime.models.images.containers import BoundedFile, check_bmp, check_png
from staged_pool.runtime.models.images.decoded import WHITE, Colour, Decoded, calling_pillow, damaged
from staged_pool.runtime.models.images.footprint import decoder_memory
from staged_pool.runtime.models.images.formats import ImageFormat, find_format
from staged_pool.runtime.models.images.jpeg import MAX_SEGMENTS, JpegStructure, decodable, read_structure
from staged_pool.runtime.models.images.orientation import UPRIGHT, read_orientation
from staged_pool.runtime.models.images.sizes import Size
from staged_pool.runtime.models.images.transparent_colour import TransparentColour, find_transparent_colour
from staged_pool.stages.errors import TooLarge, UnsupportedMedia, UnusableMedia

__all__ = ["WHITE", "Colour", "Encoded", "ImageLimits"]

_RUN_LENGTHS: Final = frozenset({1, 2})
"""Compressions of a BMP that Pillow unpacks in Python."""

MAX_SCANS: Final = 100
"""Limit of scans of one JPEG. Real ones have about ten. libjpeg-turbo's library has no such limit."""

MAX_PASSES: Final = 10
FREE_SAMPLES: Final = 2**27
"""Limit of samples that all scans of a JPEG decode: ten times its samples, or 134 million (0.2 s), if that is more.

A usual progressive JPEG decodes each sample 5 to 6 times."""

MAX_TABLE_BYTES: Final = 2**16
"""Limit of bytes of quantization tables in a JPEG. Pillow reads them in Python; a scan has at most 4, of 129 bytes."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one encoded image: the bytes of its file, and its pixels."""

    image_bytes: int
    pixels: int


class Encoded:
    """An encoded image, of which only the header has been read.

    Raises:
        TooLarge: It exceeds a limit.
        UnsupportedMedia: The format is not supported.
        UnusableMedia: It is damaged.
    """

    def __init__(self, data: bytes, limits: ImageLimits) -> None:
        if len(data) > limits.image_bytes:
            raise TooLarge(f"The image has {len(data)} bytes: at most {limits.image_bytes} are accepted.")
        self._limits = limits
        self._format = find_format(data)
        self._jpeg: JpegStructure | None = None
        self._clear: TransparentColour | None = None
        self._file: ImageFile.ImageFile | None = None
        self._orientation = UPRIGHT
        match self._format:
            case "WebP":
                # To be opened by `load`: the WebP decoder allocates the whole image when it opens the file.
                self._stored = _webp_size(data)
                _check_pixels(self._stored, limits)
            case "JPEG":
                self._jpeg = read_structure(data)
                _check_jpeg(self._jpeg)
                self._orientation = read_orientation({"exif": self._jpeg.exif, "xmp": self._jpeg.xmp})
                data = decodable(data, self._jpeg)
            case "PNG":
                check_png(data)
            case _:
                pass
        self._data = data
        if self._format != "WebP":
            self._open()

    @property
    def size(self) -> Size:
        """Height and width in pixels: upright for a JPEG, as stored for other formats."""
        height, width = self._stored
        return (width, height) if self._orientation >= 5 else (height, width)

    @property
    def memory(self) -> int:
        """Most bytes that `load` takes."""
        height, width = self._stored
        mode = "" if self._file is None else self._file.mode
        twice = self._clear is not None and self._clear.decodes_twice
        return decoder_memory(self._format, mode, height * width, self._jpeg, twice=twice)

    def shrink(self, size: Size) -> None:
        """Let the JPEG decoder skip detail, down to a size. Other formats ignore it.

        Args:
            size: Least height and width that must remain.
        """
        if self._format == "JPEG" and self._file is not None:
            height, width = size
            self._file.draft(None, (height, width) if self._orientation >= 5 else (width, height))
            self._stored = (self._file.height, self._file.width)

    def load(self, background: Colour = WHITE) -> Decoded:
        """Decode the image. To be called once.

        Args:
            background: Colour that transparent pixels are blended with.

        Raises:
            UnusableMedia: The file is damaged.
        """
        file = self._file or self._open()
        with calling_pillow(self._format):
            file.load()
            if self._clear is not None:
                self._clear.prepare()
            orientation = self._orientation if self._jpeg is not None else read_orientation(file.info)
        return Decoded(file, orientation, background, self._clear, self._format)

    def decode(self, background: Colour = WHITE) -> Image.Image:
        """Decode the image into upright RGB; see `load`."""
        return self.load(background).whole()

    def _open(self) -> ImageFile.ImageFile:
        data = self._data
        with calling_pillow(self._format):
            # Not Image.open(): its limit of pixels is a setting of the whole process.
            file = _opener(self._format)(BoundedFile(data, self._format))
        self._file = file
        self._stored = (file.height, file.width)
        _check_pixels(self._stored, self._limits)
        if isinstance(file, PngImageFile):
            self._clear = find_transparent_colour(file, data)
        if isinstance(file, BmpImageFile):
            check_bmp(data, self._stored, in_runs=file.info.get("compression") in _RUN_LENGTHS)
        return file


def _opener(format: ImageFormat) -> type[ImageFile.ImageFile]:
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


def _check_jpeg(found: JpegStructure) -> None:
    if found.segments > MAX_SEGMENTS:
        raise UnusableMedia(f"The image is a JPEG of more than {MAX_SEGMENTS} segments: that is the limit.")
    if found.scans > MAX_SCANS:
        raise UnusableMedia(f"The image is a JPEG of {found.scans} scans: at most {MAX_SCANS} are read.")
    if found.bits not in (None, 8):
        raise UnsupportedMedia(f"The image is a JPEG of {found.bits} bits a channel: it must have 8.")
    if found.table_bytes > MAX_TABLE_BYTES:
        raise UnusableMedia(
            f"The image is a JPEG of {found.table_bytes} bytes of quantization tables: at most {MAX_TABLE_BYTES} are "
            "read."
        )
    if found.scanned > max(FREE_SAMPLES, MAX_PASSES * found.samples):
        raise UnusableMedia(
            f"The image is a JPEG of {found.scans} scans, which go over its {found.samples} samples "
            f"{found.scanned / found.samples:.1f} times: at most {MAX_PASSES} times are read for one so large."
        )


def _check_pixels(size: Size, limits: ImageLimits) -> None:
    height, width = size
    if height < 1 or width < 1:
        raise UnusableMedia(f"The image is {width} x {height} pixels: it must have at least one.")
    if height * width > limits.pixels:
        raise TooLarge(
            f"The image is {width} x {height} pixels, which are {height * width}: at most {limits.pixels} are accepted."
        )


def _webp_size(data: bytes) -> Size:
    """Read the height and width of the canvas from the first chunk.

    Source: https://developers.google.com/speed/webp/docs/riff_container

    Raises:
        UnusableMedia: The chunk is none of the three that a WebP may begin with.
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
    raise damaged("WebP")
