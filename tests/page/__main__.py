"""Writes the screenshots of the page in docs/images: `python -m tests.page`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from tests.page import browser as of

FOLDER: Final = Path(__file__).parents[2] / "docs" / "images"
SETTLE_MS: Final = 12_000
"""Milliseconds of load before a screenshot, so that the charts show it."""


def main() -> None:
    """Take a screenshot of an idle server, and three of one under load."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, of.server(Path(folder)) as process, of.browser() as chromium:
        url = f"http://127.0.0.1:{process.port}/"
        with of.opened(chromium, url, []) as page:
            page.click("#send")
            page.wait_for_selector(".near")
            page.wait_for_timeout(4000)
            page.screenshot(path=FOLDER / "page-idle.png", full_page=True)
        with of.opened(chromium, url, []) as page, of.load(process.port, clients=16, texts=48):
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=FOLDER / "page-device.png", full_page=True)
        with of.opened(chromium, url, [], color_scheme="dark", viewport=of.NARROW) as page:
            with of.load(process.port, clients=16, texts=48):
                page.wait_for_timeout(SETTLE_MS)
                page.screenshot(path=FOLDER / "page-narrow.png", full_page=True)
        with of.opened(chromium, url, []) as page, of.load(process.port, clients=120, texts=48):
            page.wait_for_timeout(2 * SETTLE_MS)
            page.screenshot(path=FOLDER / "page-overload.png", full_page=True)


if __name__ == "__main__":
    main()
