"""Pixels of a decoded image as an array on Pillow's own memory.

`numpy.asarray(image)` copies the pixels through bytes and holds the interpreter's lock for it: milliseconds in which no
other thread runs. Here the array uses Pillow's memory through the Arrow C data interface
(https://arrow.apache.org/docs/format/CDataInterface.html). An RGB image has four bytes a pixel there.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_STRIP_BYTES: Final = 1 << 20
"""Bytes copied at a time, if an image lies in several blocks of memory: a fraction of a millisecond."""


class _ArrowArray(ctypes.Structure):
    """`struct ArrowArray` of the Arrow C data interface."""


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
    """Array interface of Pillow's memory, which keeps it alive."""

    def __init__(self, image: Image.Image) -> None:
        _, self._capsule = image.__arrow_c_array__()
        array = _ArrowArray.from_address(_pointer(self._capsule, b"arrow_array"))
        shape = (image.height, image.width, 4)
        if array.n_children != 1 or array.offset or array.length != image.height * image.width:
            raise ValueError("the image is not one block of pixels")
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
    """Return the pixels of an RGB image like `rgbx_pixels`, never copied. None: they lie in several blocks."""
    try:
        return np.asarray(_Memory(image))
    except ValueError:  # larger than `PIL.Image.core.get_block_size()`, by default 16 MB
        return None


def rgbx_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Return the pixels of a decoded RGB image, read-only.

    They are copied only if they lie in several blocks of memory.


    Returns:
        [height, width, 4]: red, green, blue, and an unused byte.
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
