"""Pages drawn by Pillow, of which the blocks are known; and PDFs of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pypdfium2
from PIL import Image, ImageChops, ImageDraw, ImageFont

from page_regions.regions import Box

WHITE, BLACK = (255, 255, 255), (0, 0, 0)
SIZE = (850, 1100)
"""Width and height of a page: letter paper at 100 dots per inch."""

TEXT = "In the beginning the pool was empty.\nThen requests came, in stages,\neach with an answer of its own."


@dataclass(frozen=True)
class Block:
    """A block of a page: a text, or a figure without text."""

    at: tuple[int, int]
    """Left and top."""
    text: str = ""
    size: int = 18
    """Height of the font in pixels."""
    figure: tuple[int, int] | None = None
    """Width and height of the figure."""

    def draw(self, page: Image.Image, ink: tuple[int, int, int] = BLACK) -> None:
        pen = ImageDraw.Draw(page)
        if self.figure is not None:
            left, top = self.at
            width, height = self.figure
            pen.rectangle((left, top, left + width - 1, top + height - 1), outline=ink, width=3)
            pen.ellipse((left + 20, top + 20, left + width - 21, top + height - 21), fill=(200, 40, 60))
        else:
            pen.multiline_text(self.at, self.text, fill=ink, font=ImageFont.load_default(self.size), spacing=6)

    @property
    def box(self) -> Box:
        """The smallest rectangle with all of its ink, found by drawing the block alone."""
        alone = Image.new("RGB", SIZE, WHITE)
        self.draw(alone)
        edges = ImageChops.invert(alone.convert("L")).point([0] * 128 + [255] * 128).getbbox()
        assert edges is not None
        return Box(*edges)


TITLE = Block((150, 60), "STAGES OF A REQUEST", size=40)
LEFT_COLUMN = (Block((70, 180), TEXT), Block((70, 330), TEXT), Block((70, 480), figure=(300, 240)))
RIGHT_COLUMN = (Block((470, 180), figure=(310, 150)), Block((470, 390), TEXT), Block((470, 560), TEXT))
FOOT = Block((380, 1030), "page 12")
TWO_COLUMNS = (TITLE, *LEFT_COLUMN, *RIGHT_COLUMN, FOOT)
"""Blocks of a page of two columns, in reading order."""


def drawn(*blocks: Block, paper: tuple[int, int, int] = WHITE, ink: tuple[int, int, int] = BLACK) -> Image.Image:
    page = Image.new("RGB", SIZE, paper)
    for block in blocks:
        block.draw(page, ink)
    return page


def encoded(image: Image.Image, format: str = "PNG", **settings: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **settings)
    return file.getvalue()


def pdf(pages: Sequence[Image.Image], dots_per_inch: int = 150) -> bytes:
    """A PDF whose pages are these images, pixel by pixel at that resolution."""
    first, *others = pages
    return encoded(first, "PDF", save_all=True, append_images=others, resolution=dots_per_inch, quality=95)


def empty_pdf(*sizes: tuple[float, float]) -> bytes:
    """A PDF of blank pages, of sizes in points."""
    document = pypdfium2.PdfDocument.new()
    for width, height in sizes:
        document.new_page(width, height).close()
    file = io.BytesIO()
    document.save(file)
    document.close()
    return file.getvalue()
