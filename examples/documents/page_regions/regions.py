"""Regions of a page: blocks of ink with white around them, found by a recursive cut (XY-cut).

The page is cut in two at its widest white gap, across rows or columns. Each part is cut again, until no gap is left.
The parts come in reading order: from top to bottom, and the left column before the right one.

Source: Nagy and Seth, "Hierarchical representation of optically scanned documents", 1984.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GAP: Final = 1 / 64
"""Narrowest gap between two regions, as a share of the page's longer edge. It is 4.6 mm of A4."""

LONGEST_EDGE: Final = 1600
"""Longest edge in pixels of a page when its regions are searched. A larger page is reduced for it."""

LEAST_CONTRAST: Final = 40
"""Least difference between the mean grey of ink and of paper, of 255. A page with less is blank."""

NEIGHBOURS: Final = 3
"""Least ink in the 3 x 3 pixels around a pixel of ink, itself included. With less, it is a speck."""

MAX_REGIONS: Final = 256
"""Most regions of one page."""

Ink: TypeAlias = NDArray[np.bool_]
"""Pixels of ink, [height, width]."""


class Box(NamedTuple):
    """A rectangle of pixels, without its right column and bottom row, as in Pillow."""

    left: int
    top: int
    right: int
    bottom: int


class TooManyRegions(Exception):
    """A page has more than `MAX_REGIONS`."""


def find_regions(page: Image.Image, gap: float = GAP) -> list[Box]:
    """Find the regions of a page, in reading order. A blank page has none.

    Args:
        page: The page, of any mode that Pillow converts to grey.
        gap: See `GAP`.

    Raises:
        TooManyRegions: There are more than `MAX_REGIONS`.
    """
    grey = page.convert("L")
    scale = -(-max(grey.size) // LONGEST_EDGE)
    if scale > 1:
        grey = grey.reduce(scale)
    ink = find_ink(np.asarray(grey))
    least = max(1, round(gap * max(grey.size)))
    found: list[Box] = []
    for box in _cut(ink, Box(0, 0, grey.width, grey.height), least):
        found.append(_enlarged(box, scale, page))
        if len(found) > MAX_REGIONS:
            raise TooManyRegions
    return found


def find_ink(grey: NDArray[np.uint8]) -> Ink:
    """Tell ink from paper by the darkness of the two, and drop specks. The rarer of the two is the ink."""
    threshold, contrast = _threshold(grey)
    if contrast < LEAST_CONTRAST:
        return np.zeros(grey.shape, np.bool_)
    ink = grey <= threshold
    if ink.mean() > 0.5:
        ink = ~ink
    near = np.pad(ink.astype(np.uint8), 1)
    near = near[:-2] + near[1:-1] + near[2:]
    near = near[:, :-2] + near[:, 1:-1] + near[:, 2:]
    clean: Ink = ink & (near >= NEIGHBOURS)
    return clean


def _threshold(grey: NDArray[np.uint8]) -> tuple[int, float]:
    """Return the grey that parts dark from light best, and the difference of their means.

    Source: Otsu, "A threshold selection method from gray-level histograms", 1979.
    """
    counts = np.bincount(grey.ravel(), minlength=256).astype(np.float64)
    dark = counts.cumsum()
    light = dark[-1] - dark
    sums = (counts * np.arange(256)).cumsum()
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = (sums[-1] - sums) / light - sums / dark
        variances = np.nan_to_num(dark * light * differences**2)
    best = int(variances.argmax())
    return best, float(np.nan_to_num(differences[best]))


def _cut(ink: Ink, box: Box, least: int) -> Iterator[Box]:
    """Yield the parts of a box that have no gap of `least` pixels."""
    here = ink[box.top : box.bottom, box.left : box.right]
    rows, columns = _Lines.of(here.any(axis=1)), _Lines.of(here.any(axis=0))
    if rows is None or columns is None:
        return
    if max(rows.gap, columns.gap) < least:
        yield Box(box.left + columns.first, box.top + rows.first, box.left + columns.end, box.top + rows.end)
    elif rows.gap >= columns.gap:
        yield from _cut(ink, box._replace(bottom=box.top + rows.cut), least)
        yield from _cut(ink, box._replace(top=box.top + rows.cut), least)
    else:
        yield from _cut(ink, box._replace(right=box.left + columns.cut), least)
        yield from _cut(ink, box._replace(left=box.left + columns.cut), least)


class _Lines(NamedTuple):
    """Rows or columns with ink, and the widest gap between them."""

    first: int
    end: int
    gap: int
    """Width of the widest gap in pixels."""
    cut: int
    """The first line after it."""

    @staticmethod
    def of(has_ink: Any) -> _Lines | None:
        """Find the gap; None if there is no ink."""
        (lines,) = np.nonzero(has_ink)
        if not len(lines):
            return None
        gaps = np.diff(lines, prepend=lines[0] - 1) - 1
        widest = int(gaps.argmax())
        return _Lines(int(lines[0]), int(lines[-1]) + 1, int(gaps[widest]), int(lines[widest]))


def _enlarged(box: Box, scale: int, page: Image.Image) -> Box:
    """Return a box of a reduced page on the page itself."""
    return Box(
        box.left * scale,
        box.top * scale,
        min(box.right * scale, page.width),
        min(box.bottom * scale, page.height),
    )
