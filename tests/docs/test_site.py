"""The documentation site is whole, and its build fails where something is missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
from blockbuster import BlockBuster

from tests.docs.site import CONFIG, Site, documents, problems, settings
from tests.packaging.floors import ROOT

HEAD: Final = CONFIG.read_text().partition("\nnav:\n")[0]

HOSTS: Final = {"cdn.jsdelivr.net", "unpkg.com"}
"""Hosts in the theme's script, which asks them for features that no page uses (`site.LOADED_ON_DEMAND`)."""


@pytest.fixture(autouse=True)
def files_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()


def _site(folder: Path, nav: str, **pages: str) -> list[str]:
    """Build a small site; return its problems."""
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text)
    config = folder / "mkdocs.yml"
    config.write_text(f"{HEAD}\nnav:\n{nav}")
    return problems(config, folder, [Path(f"{name}.md") for name in pages])


def test_the_site_is_whole() -> None:
    assert problems() == []
    site = Site(ROOT / settings()["site_dir"])
    assert len(site.pages) == len(documents()) + 1  # that of the status 404
    home = site.pages[site.folder / "index.html"]
    pages = {str(page).removesuffix(".md").replace("README", "index") + ".html" for page in documents()}
    assert pages <= {target.removeprefix("./") for target in home.targets}, "the theme hides pages of the nav"
    assert "perf/results/overload.svg" in home.loaded


WRONG: Final = {
    "a": ("[a](no.md)", "a.md:1:5: zensical finds no such page"),
    "b": ("[a](#no)", "b.html: #no leads nowhere"),
    "c": ("[a](../../no.py)", "c.html: ../../no.py leads nowhere"),
    "d": ("![a](no.png)", "d.html: no.png is missing"),
    "e": ("![a](https://example.org/a.png)", "e.html: loads https://example.org/a.png from elsewhere"),
    "f": ("<script src='//example.org/a.js'></script>", "f.html: loads //example.org/a.js from elsewhere"),
    "g": ('<p class="mermaid">a</p>', "g.html: mermaid comes from elsewhere"),
    "outside": ("a", "outside.md: not in the nav of mkdocs.yml"),
}
"""Pages, and the problem of each."""


def test_the_build_fails_on_each_wrong_page(tmp_path: Path) -> None:
    nav = "".join(f"  - {name}.md\n" for name in WRONG if name != "outside") + "  - none.md\n"
    found = _site(tmp_path, nav, **{name: text for name, (text, _) in WRONG.items()})
    assert {problem for _, problem in WRONG.values()} <= {*found}
    assert "none.md: in the nav of mkdocs.yml, and no document" in found


def test_a_right_site_has_no_problem(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("c")
    pages = {"a": "# A\n\n[b](b.md#the-end) [c](c.txt) [d](https://example.org)\n", "b": "## The `end`\n"}
    assert _site(tmp_path, "  - a.md\n  - B: [b.md]\n", **pages) == []
    assert (tmp_path / "build/site/c.txt").read_text() == "c"


def test_scripts_name_known_hosts_alone() -> None:
    """A new version of the theme may ask others."""
    site = Site(ROOT / settings()["site_dir"])
    scripts = "".join(path.read_text() for path in site.folder.rglob("*.js"))
    found = set(re.findall(r"https://([\w.-]+)/[^\"'`]*\.(?:js|css|mjs|wasm)", scripts))
    assert found <= HOSTS
