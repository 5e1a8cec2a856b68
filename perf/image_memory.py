"""Peak memory of reading one image, in bytes a pixel, compared with its reservation.

    python -m perf.image_memory              # every kind, both paths; needs Linux and glibc
    python -m perf.image_memory --pixels 64  # millions of pixels an image

The kernel reports the largest resident set while an image is read. `ImageReader` reserves the estimate of
`runtime/models/images/footprint.py`, which must not be below the peak measured here.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

from PIL import Image as Pillow
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from perf.tools.image_files import Make, noisy, png, saved
from staged_pool.runtime.config import EngineConfig, ImagePath
from staged_pool.runtime.models.images.open_reader import open_reader
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.requests import Image


def _turned() -> bytes:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


KINDS: dict[str, Make] = {
    "png 1": png(1, 0),
    "png 1, clear": png(1, 0, clear=b"\0\1"),
    "png grey": png(8, 0),
    "png grey, clear": png(8, 0, clear=b"\0\1"),
    "png grey 16": png(16, 0),
    "png grey 16, clear": png(16, 0, clear=b"\0\1"),
    "png grey alpha": png(8, 4),
    "png palette": png(8, 3),
    "png palette, clear": png(8, 3, clear=b"\x80"),
    "png rgb": png(8, 2),
    "png rgb, clear": png(8, 2, clear=bytes(6)),
    "png rgb 16": png(16, 2),
    "png rgb 16, clear": png(16, 2, clear=bytes(6)),
    "png rgba": png(8, 6),
    "png rgba 16": png(16, 6),
    "png rgba, interlaced": png(8, 6, interlaced=True),
    "png 1, interlaced": png(1, 0, interlaced=True),
    "jpeg": saved("RGB", "JPEG"),
    "jpeg, turned": saved("RGB", "JPEG", exif=_turned()),
    "jpeg grey": saved("L", "JPEG"),
    "jpeg cmyk": saved("CMYK", "JPEG"),
    "jpeg progressive": saved("RGB", "JPEG", progressive=True),
    "jpeg progressive 4:4:4": saved("RGB", "JPEG", progressive=True, subsampling=0),
    "jpeg progressive cmyk": saved("CMYK", "JPEG", progressive=True),
    "jpeg progressive grey": saved("L", "JPEG", progressive=True),
    "webp": saved("RGB", "WebP", method=0),
    "webp alpha": saved("RGBA", "WebP", method=0),
    "webp lossless": saved("RGB", "WebP", lossless=True, method=0),
    "webp lossless alpha": saved("RGBA", "WebP", lossless=True, method=0),
    "webp lossless, noise": noisy("WebP", lossless=True, method=0),
    "webp, noise": noisy("WebP", method=0),
    "jpeg progressive, noise": noisy("JPEG", progressive=True),
    "gif": saved("P", "GIF"),
    "gif, clear": saved("P", "GIF", transparency=0),
    "bmp 1": saved("1", "BMP"),
    "bmp palette": saved("P", "BMP"),
    "bmp": saved("RGB", "BMP"),
}

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
"""Makes glibc return freed memory at once; memory kept from one image would hide the peak of the next."""


def measure(reader: ImageReader, data: bytes) -> tuple[int, int]:
    """Return the peak while an image is read, and its reservation, in bytes."""
    image = Image(data)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes("VmRSS")
    reader.read(image)
    return resident_bytes("VmHWM") - before, reader.memory(image)


def resident_bytes(name: str) -> int:
    """Return a figure of `/proc/self/status`, such as VmRSS, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> int:
    """Print a line for each kind; return the number of kinds that exceed their reservation."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pixels", type=float, default=16, help="millions, of each image")
    arguments.add_argument("--kinds", nargs="*", help="only those that begin so")
    given = arguments.parse_args()
    if ALLOCATOR.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", "perf.image_memory", *sys.argv[1:]], os.environ | ALLOCATOR)
    edge = int((given.pixels * 1e6) ** 0.5)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        CLIPImageProcessorPil().save_pretrained(folder)
        settings = read_image_settings(Path(folder))
        paths: tuple[ImagePath, ...] = ("fast", "exact")
        readers = [
            open_reader(settings, EngineConfig(image_path=path, max_image_pixels=2**40, max_image_bytes=2**40))
            for path in paths
        ]
        for reader in readers:
            reader.read(Image(KINDS["png rgba"](1000)))  # warm up: imports, and objects that are made once
        gc.collect()
        gc.freeze()  # libraries are not gone through again for each image
        for kind, make in KINDS.items():
            if given.kinds and not kind.startswith(tuple(given.kinds)):
                continue
            data = make(edge)
            for reader in readers:
                peak, reserved = (value / edge**2 for value in measure(reader, data))
                wrong += peak > reserved
                mark = "  more than is reserved" if peak > reserved else ""
                print(
                    f"{kind:24} {reader.path:5} {len(data):9} bytes  {peak:5.1f} of {reserved:5.1f}{mark}", flush=True
                )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
