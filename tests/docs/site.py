"""The documentation site: its pages, its build by zensical, and checks of what was built.

`python -m tests.docs.site` builds it into build/site, and ends with an error if anything is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import yaml

from tests.packaging.documents import DOCUMENTS, links, read
from tests.packaging.floors import ROOT

CONFIG: Final = ROOT / "mkdocs.yml"
COLORS: Final = re.compile(r"\x1b\[[0-9;]*m")

LOADED_ON_DEMAND: Final = ("mermaid", "glightbox", "pyodide")
"""Features of the theme that come from elsewhere.

The script of the theme fetches one as soon as a page has an element of its class.
"""


class _AnyTag(yaml.SafeLoader):
    """Reads mkdocs.yml, which may name functions of Python. They become None."""


_AnyTag.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def settings(config: Path = CONFIG) -> Mapping[str, Any]:
    """Return the settings of the site."""
    with config.open() as file:
        loaded: Mapping[str, Any] = yaml.load(file, _AnyTag)
    return loaded


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages of a table of contents, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, Mapping) else nav:
            yield from pages_of(entry)


def documents() -> Sequence[Path]:
    """Return the documents that are pages, relative to the repository: also reports that others link to."""
    found = [path.relative_to(ROOT) for path in DOCUMENTS if ".github" not in path.parts]
    return [*found, *sorted(file for file in {*files_of(found)} if file.suffix == ".md")]


def files_of(pages: Sequence[Path], root: Path = ROOT) -> Iterator[Path]:
    """Yield the other files that pages link to, relative to the repository."""
    for page in pages:
        for target in links(read(root / page)):
            file = Path(os.path.normpath(page.parent / target.partition("#")[0]))
            if (root / file).is_file() and file not in pages:
                yield file


def copy(pages: Sequence[Path], folder: Path, root: Path = ROOT) -> None:
    """Write the source of the site: pages and the files that they link to, where they are in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    for file in {*pages, *files_of(pages, root)}:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, folder / file)


def build(config: Path = CONFIG) -> list[str]:
    """Build the source with zensical; return its warnings."""
    shutil.rmtree(config.parent / settings(config)["site_dir"], ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    run = subprocess.run(
        command, cwd=config.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    lines = COLORS.sub("", run.stdout).splitlines()
    places = [line.strip(" ╭─[]") for line in lines if "╭─" in line]
    found = [f"{place}: zensical finds no such page" for place in places]
    return found or ([] if run.returncode == 0 else [f"zensical: {lines[-1] if lines else run.returncode}"])


class Page(HTMLParser):
    """A built page: its links, the files that it loads, its anchors and its classes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        self.classes |= {*found.get("class", "").split()}
        if tag == "a":
            self.targets += [found["href"]] if "href" in found else []
        elif tag == "link" and found.get("rel") in ("canonical", "next", "prev"):
            return
        else:
            self.loaded += [found[name] for name in ("href", "src", "data") if name in found]


class Site:
    """A built site, to be checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def pages(self) -> Mapping[Path, Page]:
        return {path: Page(path) for path in sorted(self.folder.rglob("*.html"))}

    def problems(self) -> Iterator[str]:
        """Yield the links that lead nowhere, and what a browser would load from elsewhere."""
        for path, page in self.pages.items():
            name = path.relative_to(self.folder)
            if name.name == "404.html":  # its addresses begin with a slash
                continue
            yield from (f"{name}: {target} leads nowhere" for target in page.targets if not self._exists(page, target))
            for target in page.loaded:
                if urlsplit(target).netloc:
                    yield f"{name}: loads {target} from elsewhere"
                elif not self._exists(page, target):
                    yield f"{name}: {target} is missing"
            yield from (
                f"{name}: {feature} comes from elsewhere" for feature in LOADED_ON_DEMAND if feature in page.classes
            )
        for path in self.folder.rglob("*.css"):
            for target in re.findall(r"(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')]+)", path.read_text()):
                yield f"{path.relative_to(self.folder)}: loads {target} from elsewhere"

    def _exists(self, page: Page, target: str) -> bool:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            return True
        there = Path(os.path.normpath(page.path.parent / unquote(parts.path))) if parts.path else page.path
        if there.is_dir():
            there /= "index.html"
        if not there.is_file() or not there.is_relative_to(self.folder):
            return False
        anchor = unquote(parts.fragment)
        return not anchor or anchor.startswith("__") or there not in self.pages or anchor in self.pages[there].anchors


def problems(config: Path = CONFIG, root: Path = ROOT, pages: Sequence[Path] | None = None) -> list[str]:
    """Build the site; return all that is wrong with it."""
    made = settings(config)
    pages = documents() if pages is None else pages
    in_nav = [Path(page) for page in pages_of(made["nav"])]
    found = [f"{page}: not in the nav of mkdocs.yml" for page in pages if page not in in_nav]
    found += [f"{page}: in the nav of mkdocs.yml, and no document" for page in in_nav if page not in pages]
    found += [f"{page}: twice in the nav of mkdocs.yml" for page in set(in_nav) if in_nav.count(page) > 1]
    copy(pages, config.parent / made["docs_dir"], root)
    return found + build(config) + list(Site(config.parent / made["site_dir"]).problems())


def main() -> None:
    found = problems()
    if found:
        sys.exit("\n".join(found))
    folder = ROOT / settings()["site_dir"]
    print(f"{len(documents())} pages, in {folder.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
