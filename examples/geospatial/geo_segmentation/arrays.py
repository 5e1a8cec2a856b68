"""Types of the arrays."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Bands: TypeAlias = NDArray[np.float32]
"""Values of bands, [bands, height, width]."""
Flags: TypeAlias = NDArray[np.bool_]
"""Pixels that have data, [height, width]."""
Mask: TypeAlias = NDArray[np.uint8]
"""Class of each pixel, [height, width]."""
