"""The pixels of a decoded image as an array, without the copy that takes most of the time under the lock.

`numpy.asarray(image)` packs an image's pixels anew, through bytes, all of it while it holds the interpreter's lock:
milliseconds in which no other thread runs. Pillow shows its memory through the Arrow C data interface instead
(https://arrow.apache.org/docs/format/CDataInterface.html); RGB images lie there as four bytes a pixel.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_STRIP_BYTES: Final = 1 << 20
"""What is copied at a time where an image lies in several pieces: a fraction of a millisecond."""


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of the interface."""


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]

_pointer: Final = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Memory:
    """Keeps Pillow's memory alive for as long as an array looks at it."""

    def __init__(self, image: Image.Image) -> None:
        _, self._capsule = image.__arrow_c_array__()
        array = _ArrowArray.from_address(_pointer(self._capsule, b"arrow_array"))
        shape = (image.height, image.width, 4)
        if array.n_children != 1 or array.offset or array.length != image.height * image.width:
            raise ValueError("the image is not a list of pixels")
        pixels = array.children[0].contents
        if pixels.n_buffers != 2 or pixels.offset or pixels.length != 4 * array.length:
            raise ValueError("the pixels are not four bytes each")
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "data": (pixels.buffers[1], False),
        }


def shared_pixels(image: Image.Image) -> NDArray[np.uint8] | None:
    """Pillow's own memory of an RGB image, as `rgbx_pixels` gives it. None: it lies in several pieces."""
    try:
        return np.asarray(_Memory(image))
    except ValueError:  # larger than `PIL.Image.core.get_block_size()`, by default 16 MB
        return None


def rgbx_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """The pixels of a decoded RGB image, not copied unless it lies in several pieces. Must not be written to.

    Returns:
        [height, width, 4]: red, green, blue, and a byte without meaning.
    """
    shared = shared_pixels(image)
    return _copied(image) if shared is None else shared


def _copied(image: Image.Image) -> NDArray[np.uint8]:
    width, height = image.size
    pixels = np.empty((height, width, 4), dtype=np.uint8)
    rows = max(1, _STRIP_BYTES // (4 * width))
    for top in range(0, height, rows):
        bottom = min(height, top + rows)
        pixels[top:bottom] = np.asarray(_Memory(image.crop((0, top, width, bottom))))
    return pixels
