"""Program of the worker processes of `custom_code.py`: prepares images until its input ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.exact_processor import read_exact
from staged_pool.runtime.models.images.process_messages import receive, send
from staged_pool.runtime.models.images.settings import custom_code_settings, load_processor
from staged_pool.runtime.models.images.sizes import check_aspect
from staged_pool.stages.errors import InvalidInput


def main(folder: Path, limits: ImageLimits) -> None:
    """Report if the code can be loaded, then prepare images until the input ends."""
    source, to = _take_streams()
    torch.set_num_threads(1)
    settings = custom_code_settings(folder)
    try:
        processor = load_processor(folder, trust_remote_code=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the folder's code may raise anything
        send(to, {"error": f"{settings.processor}: the folder's own image processor cannot be loaded: {error}"})
        return
    send(to, {})
    while True:
        try:
            head, data = receive(source)
        except EOFError:
            return
        try:
            red, green, blue = head["background"]
            encoded = Encoded(data, limits)
            check_aspect(encoded.size)  # as for every processor that is not known
            image = encoded.decode((red, green, blue))
            pixels = read_exact(image, processor, settings, {})
        except InvalidInput as error:
            send(to, {"error": type(error).__name__, "message": str(error)})
        except (Exception, SystemExit):  # noqa: BLE001  # as above
            send(to, {"error": "UnusableMedia", "message": "The model's own image processor cannot use the image."})
        else:
            values = np.ascontiguousarray(pixels.values, dtype=np.float32)
            send(to, {"shape": values.shape, "grid": pixels.grid}, values.tobytes())


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """Reserve the standard streams for messages, and point the code's output to stderr."""
    source, to = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source, to


if __name__ == "__main__":
    main(Path(sys.argv[1]), ImageLimits(image_bytes=int(sys.argv[2]), pixels=int(sys.argv[3])))
