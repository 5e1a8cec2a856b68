"""The page `/` in a real browser, on idle and loaded servers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster

from tests.page import browser as of
from tests.servers.process import ServerProcess

pytestmark = [
    pytest.mark.skipif(of.CHROMIUM is None, reason="there is no Chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="the extra `page` is not installed"),
]

WAIT_MS = 60_000
"""Limit in milliseconds for what a loaded machine takes long for."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with of.server(tmp_path_factory.mktemp("server")) as process:
        yield process


@pytest.fixture
def chromium(nothing_blocks_the_event_loop: BlockBuster) -> Iterator[Any]:
    nothing_blocks_the_event_loop.deactivate()  # playwright runs its loop in this thread, between our calls
    with of.browser() as started:
        yield started


@pytest.fixture
def problems() -> Iterator[list[str]]:
    """Errors and warnings of the console; there must be none at the end of the test."""
    found: list[str] = []
    yield found
    assert found == []


def url(process: ServerProcess) -> str:
    return f"http://127.0.0.1:{process.port}/"


def says(page: Any, text: str) -> None:
    of.until(page, f"document.getElementById('sentence').textContent.includes({text!r})")


def test_an_idle_server_is_called_idle(process: ServerProcess, chromium: Any, problems: list[str]) -> None:
    with of.opened(chromium, url(process), problems) as page:
        says(page, "Idle. Ready for requests.")
        assert page.title() == "idle · staged-pool"
        assert page.locator(".stage h3").all_inner_texts()[1].startswith("parse")
        assert page.locator("#state").inner_text() == "serving"


def test_the_box_finds_the_nearest_text_and_says_where_the_time_went(
    process: ServerProcess, chromium: Any, problems: list[str]
) -> None:
    with of.opened(chromium, url(process), problems) as page:
        page.fill("#text", "My package has not arrived")
        page.press("#text", "Control+Enter")
        page.wait_for_selector(".near", timeout=WAIT_MS)
        assert page.locator(".near p").first.inner_text() == "Where is my parcel?"
        assert "384 numbers" in page.locator("#answer").inner_text()
        assert "wait for the device" in page.locator("#answer .facts").inner_text()


def test_a_rejected_input_is_told_in_the_box(process: ServerProcess, chromium: Any, problems: list[str]) -> None:
    with of.opened(chromium, url(process), problems) as page:
        page.fill("#text", "word " * 2000)
        page.click("#send")
        page.wait_for_selector("#answer .failed", timeout=WAIT_MS)
        assert "maximum context length" in page.locator("#answer .failed").inner_text()
    problems[:] = [line for line in problems if "400" not in line]  # Chromium logs each answer of that kind


def test_queues_fill_under_load_and_the_device_is_named(
    process: ServerProcess, chromium: Any, problems: list[str]
) -> None:
    with of.opened(chromium, url(process), problems) as page, of.load(process.port, clients=16, texts=48):
        says(page, "The device is the bottleneck.")
        page.wait_for_selector(".stage.device.hot .tag", timeout=WAIT_MS)
        height = page.evaluate("document.querySelector('.device .fill').style.getPropertyValue('--height')")
        assert float(height.removesuffix("%")) > 50, "the tank is more than half full"
        assert page.title() == "▲ device · staged-pool"
        assert "% busy" in page.locator("#why").inner_text()
        rate = "document.querySelector('#rate').textContent"
        of.until(page, f"parseFloat({rate}) > 0")
        ink = page.evaluate(
            "(() => { const lane = document.querySelector('.lanes canvas'), all = lane.getContext('2d')"
            ".getImageData(0, 0, lane.width, lane.height).data; return new Set(all).size; })()"
        )
        assert ink > 3, "batches are drawn"


def test_a_narrow_screen_needs_no_scrolling_to_the_side(
    process: ServerProcess, chromium: Any, problems: list[str]
) -> None:
    with of.opened(chromium, url(process), problems, viewport=of.NARROW) as page:
        says(page, "Idle")
        page.click("#send")
        page.wait_for_selector(".near", timeout=WAIT_MS)
        page.click("summary")
        assert page.evaluate("document.documentElement.scrollWidth") == of.NARROW["width"]
        heights = page.evaluate(
            "[...document.querySelectorAll('button, select, .button, summary')]"
            ".filter(each => each.offsetParent).map(each => each.getBoundingClientRect().height)"
        )
        assert min(heights) >= 32, "targets are large enough to touch"


def test_dark_and_light_follow_the_system_and_the_button(
    process: ServerProcess, chromium: Any, problems: list[str]
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with of.opened(chromium, url(process), problems, color_scheme="dark") as page:
        dark = page.evaluate(paper)
        page.click("#theme")
        assert page.evaluate(paper) != dark
        assert page.locator("#theme").inner_text() == "Dark"


def test_the_keyboard_reaches_everything(process: ServerProcess, chromium: Any, problems: list[str]) -> None:
    with of.opened(chromium, url(process), problems) as page:
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert reached[0] == "Skip to the verdict"
    assert {"model", "theme", "pause", "text", "send", "curl"} <= set(reached)


def test_nothing_moves_for_those_who_asked_for_that(process: ServerProcess, chromium: Any, problems: list[str]) -> None:
    with of.opened(chromium, url(process), problems, reduced_motion="reduce") as page:
        with of.load(process.port, clients=2, texts=4):
            of.until(page, "!document.querySelector('.pipe').classList.contains('none')")
            assert page.evaluate("document.getAnimations().length") == 0


def test_pause_stops_the_picture(process: ServerProcess, chromium: Any, problems: list[str]) -> None:
    with of.opened(chromium, url(process), problems) as page:
        page.click("#pause")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        before = page.evaluate("newest.at")
        page.wait_for_timeout(1000)
        assert page.evaluate("newest.at") == before
        page.click("#pause")
        of.until(page, f"newest.at > {before}")


def test_a_server_that_ends_makes_the_page_grey(chromium: Any, tmp_path: Path) -> None:
    with of.server(tmp_path) as process, of.opened(chromium, url(process), []) as page:
        says(page, "Idle")
        process.process.kill()
        says(page, "No answer")
        assert "lost-contact" in page.locator("body").get_attribute("class")


def test_the_page_asks_for_the_key(chromium: Any, tmp_path: Path) -> None:
    with of.server(tmp_path, "--api-key", "secret") as process:
        context = chromium.new_context(viewport=of.WIDE)
        page = context.new_page()
        page.goto(url(process))
        says(page, "The server asks for an API key.")
        page.fill("#key input", "secret")
        page.press("#key input", "Enter")
        says(page, "Idle")
        context.close()
