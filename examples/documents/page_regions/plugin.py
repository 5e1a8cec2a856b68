"""Plugins: `page_embeddings` embeds regions by the served model, and `page_regions` finds them for a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image as Pillow

from page_regions.pages import Page, PageReader
from page_regions.regions import MAX_REGIONS, Box, TooManyRegions, find_regions
from page_regions.request import PagesRequest, parse_request
from staged_pool import Image, Output, PluginContext, PluginSetup, Processor, Row, StagedPoolError, TooLarge


@dataclass(frozen=True, slots=True)
class Loaded:
    """A request with the bytes of its sources, or their errors."""

    request: PagesRequest
    sources: tuple[bytes | StagedPoolError, ...]


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A page without its pixels, kept for the answer."""

    source: int
    number: int
    size: tuple[int, int]
    """Width and height; 0 if there is an error."""
    regions: tuple[Box, ...]
    error: StagedPoolError | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """A region of a page, cut out."""

    page: int
    """Number of the page in its PDF, from 0."""
    box: Box
    crop: Image


class _Pages(Processor):
    """Hooks that both plugins share.

    Args:
        setup: Limits of images.
    """

    def __init__(self, setup: PluginSetup) -> None:
        self._pages = PageReader(setup.fetch, setup.config)

    async def parse(self, data: object, context: PluginContext) -> PagesRequest:
        """Check the fields of a request. It is quick, and needs no thread."""
        return parse_request(data)

    async def load(self, prompt: PagesRequest, context: PluginContext) -> Loaded:
        """Fetch the sources."""
        return Loaded(prompt, await self._pages.fetch(prompt.sources))


class PageEmbeddings(_Pages):
    """Finds the regions of pages, and embeds each with the served model.

    Args:
        setup: Limits of images, and the served model.
    """

    name = "page_embeddings"
    outputs = (Output.DENSE,)

    def preprocess(self, loaded: Loaded, context: PluginContext) -> Sequence[Image]:
        """Find the regions of all pages, and cut them out."""
        found: list[FoundPage] = []
        crops: list[Image] = []
        for page in self._pages.decode(loaded.sources):
            context.check()
            found_page = search(page, loaded.request.gap)
            found.append(found_page)
            crops += cut_out(page, found_page)
        context.state = found
        return crops

    def postprocess(self, rows: Sequence[Row], context: PluginContext) -> dict[str, Any]:
        """Put the embeddings at their regions."""
        pages: list[FoundPage] = context.state
        embeddings = iter([np.asarray(row.values[Output.DENSE]).tolist() for row in rows])
        return {"pages": [described(page, embeddings) for page in pages]}


class PageRegions(_Pages):
    """Finds the regions of one source, for a pipeline whose next stage reads them: a list of `Region`.

    It gives the model nothing to do. An error of a page is that of its request, so that the pipeline may skip it.
    """

    name = "page_regions"

    async def parse(self, data: object, context: PluginContext) -> PagesRequest:
        """Check the item of a pipeline: a URL, or a request of one page."""
        return parse_request({"pages": [data]} if isinstance(data, str) else data)

    def preprocess(self, loaded: Loaded, context: PluginContext) -> Sequence[Image]:
        """Find the regions, and keep them for the output."""
        regions: list[Region] = []
        for page in self._pages.decode(loaded.sources):
            context.check()
            found = search(page, loaded.request.gap)
            if found.error is not None:
                raise found.error
            crops = cut_out(page, found)
            regions += [Region(found.number, box, crop) for box, crop in zip(found.regions, crops, strict=True)]
        context.state = regions
        return ()

    def postprocess(self, rows: Sequence[Row], context: PluginContext) -> list[Region]:
        """Return the regions."""
        regions: list[Region] = context.state
        return regions


def search(page: Page, gap: float) -> FoundPage:
    """Find the regions of a page, unless it has an error already."""
    if isinstance(page.image, StagedPoolError):
        return FoundPage(page.source, page.number, (0, 0), (), page.image)
    try:
        regions = find_regions(page.image, gap)
    except TooManyRegions:
        error = TooLarge(f"The page has more than {MAX_REGIONS} regions: give a greater gap.")
        return FoundPage(page.source, page.number, page.image.size, (), error)
    return FoundPage(page.source, page.number, page.image.size, tuple(regions))


def cut_out(page: Page, found: FoundPage) -> Iterator[Image]:
    """Yield the regions of a page as BMPs: they take no time to compress."""
    if isinstance(page.image, Pillow.Image):
        for box in found.regions:
            file = BytesIO()
            page.image.crop(box).save(file, "BMP")
            yield Image(file.getvalue())


def described(page: FoundPage, embeddings: Iterator[list[float]]) -> dict[str, Any]:
    """Return the part of the answer about one page.

    Args:
        page: The page.
        embeddings: Those of its regions come next.
    """
    place: dict[str, Any] = {"source": page.source, "number": page.number}
    if page.error is not None:
        return place | {"error": {"message": str(page.error), "type": type(page.error).__name__}}
    regions = [{"box": list(box), "embedding": next(embeddings)} for box in page.regions]
    return place | {"width": page.size[0], "height": page.size[1], "regions": regions}
