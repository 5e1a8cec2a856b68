"""Regions of drawn pages, found where they were drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageDraw

from page_regions import regions
from page_regions.regions import Box, TooManyRegions, find_ink, find_regions
from tests.examples.documents.drawn_pages import FOOT, SIZE, TEXT, TITLE, TWO_COLUMNS, Block, drawn


def test_blocks_of_a_page_are_found_where_they_are_in_reading_order() -> None:
    assert are_at(find_regions(drawn(*TWO_COLUMNS)), TWO_COLUMNS)


def test_the_order_of_drawing_does_not_matter() -> None:
    assert find_regions(drawn(*reversed(TWO_COLUMNS))) == find_regions(drawn(*TWO_COLUMNS))


@pytest.mark.parametrize(
    ("paper", "ink"),
    [((0, 0, 40), (240, 240, 220)), ((250, 240, 200), (90, 60, 30)), ((180, 180, 180), (60, 60, 60))],
    ids=["light on dark", "brown on cream", "faint"],
)
def test_ink_of_any_colour_is_found(paper: tuple[int, int, int], ink: tuple[int, int, int]) -> None:
    blocks = (TITLE, Block((70, 180), TEXT), FOOT)
    assert are_at(find_regions(drawn(*blocks, paper=paper, ink=ink)), blocks)


def are_at(found: Sequence[Box], blocks: Sequence[Block], *, scale: int = 1, within: int = 1) -> bool:
    """Compare with the boxes of blocks. A smoothed edge of a letter may count as ink or not."""
    expected = np.array([block.box for block in blocks]) * scale
    return len(found) == len(blocks) and bool((np.abs(np.array(found) - expected) <= within).all())


@pytest.mark.parametrize("grey", [0, 128, 255])
def test_a_blank_page_has_no_region(grey: int) -> None:
    noise = np.random.default_rng(0).integers(-9, 10, SIZE[::-1])
    assert find_regions(Image.new("L", SIZE, grey)) == []
    assert find_regions(Image.fromarray((grey + noise).clip(0, 255).astype(np.uint8))) == []


def test_specks_are_no_regions_and_close_no_gap() -> None:
    page = np.array(drawn(*TWO_COLUMNS))
    random = np.random.default_rng(1)
    for row, column in zip(random.integers(0, SIZE[1], 300), random.integers(0, SIZE[0], 300), strict=True):
        page[row, column] = 0
    assert are_at(find_regions(Image.fromarray(page)), TWO_COLUMNS, within=2)


def test_a_thin_line_is_ink_but_for_its_ends() -> None:
    page = Image.new("L", SIZE, 255)
    ImageDraw.Draw(page).line((100, 500, 700, 500), fill=0)
    assert find_regions(page) == [Box(101, 500, 700, 501)]


def test_a_large_page_is_searched_reduced() -> None:
    """Boxes are those of the page itself, up to a pixel of the reduced one."""
    page = drawn(*TWO_COLUMNS).resize((SIZE[0] * 4, SIZE[1] * 4), Image.Resampling.NEAREST)
    assert are_at(find_regions(page), TWO_COLUMNS, scale=4, within=8)


def test_the_gap_decides_what_is_one_region() -> None:
    page = drawn(Block((70, 180), TEXT), Block((70, 290), TEXT))
    upper, lower = Block((70, 180), TEXT).box, Block((70, 290), TEXT).box
    white = lower.top - upper.bottom
    assert find_regions(page, gap=white / SIZE[1]) == [upper, lower]
    assert find_regions(page, gap=(white + 1) / SIZE[1]) == [Box(upper.left, upper.top, upper.right, lower.bottom)]


def test_a_page_of_dots_is_stopped_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    page = Image.new("L", (400, 400), 255)
    for left in range(0, 400, 40):
        for top in range(0, 400, 40):
            page.paste(0, (left, top, left + 10, top + 10))
    assert len(find_regions(page)) == 100
    monkeypatch.setattr(regions, "MAX_REGIONS", 99)
    with pytest.raises(TooManyRegions):
        find_regions(page)


def test_small_pages_are_searched_too() -> None:
    assert find_regions(Image.new("L", (1, 1), 0)) == []
    page = Image.new("L", (9, 9), 255)
    page.paste(0, (2, 3, 6, 7))
    assert find_regions(page) == [Box(2, 3, 6, 7)]


def test_ink_is_the_rarer_of_dark_and_light() -> None:
    grey = np.full((10, 10), 230, np.uint8)
    grey[2:5, 3:7] = 20
    assert np.array_equal(find_ink(grey), grey < 100)
    assert np.array_equal(find_ink(255 - grey), grey < 100)
