"""Regions of pages without a server: `python -m page_regions page.png report.pdf`."""

from __future__ import annotations

import sys
from pathlib import Path

from page_regions.pages import PageReader
from page_regions.plugin import search
from page_regions.regions import GAP
from staged_pool import EngineConfig, UrlNotAllowed


async def _not_fetched(url: str) -> bytes:
    raise UrlNotAllowed("Only files are read here.")


def main() -> None:
    files = [Path(name).read_bytes() for name in sys.argv[1:]]
    for page in PageReader(_not_fetched, EngineConfig()).decode(tuple(files)):
        found = search(page, GAP)
        name = f"{sys.argv[1 + page.source]}, page {page.number}"
        print(f"{name}: {found.error or f'{found.size[0]} x {found.size[1]} pixels'}")
        for box in found.regions:
            print(f"  {box.left:5} {box.top:5} {box.right:5} {box.bottom:5}")


if __name__ == "__main__":
    main()
