"""The documents of the repository, and the names in them that tests look up."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import click

from staged_pool.api.commands import cli
from tests.packaging.floors import ROOT

DOCUMENTS: Final = tuple(
    sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob(".github/**/*.md"),
            *(
                path
                for top in ("docs", "deploy", "examples", "tests", "runtime")
                for path in ROOT.glob(f"{top}/**/*.md")
            ),
            *ROOT.glob("perf/*.md"),
        ]
    )
)
"""All documents but the reports in perf/results."""

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SPAN: Final = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
_LINK: Final = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
_PATH: Final = re.compile(
    r"(?<![\w/.*-])(?:stages|runtime|api|perf|tests|examples|docs|deploy|\.github|\.ci)/[\w./*-]*"
)
_SENTENCE_END: Final = re.compile(r"(?<=[.?!:;])[)*`\"]*\s+")


def every_command() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the commands of `staged-pool` with their words; those of a group stand behind it."""
    for name, command in cli.main.commands.items():
        yield (name,), command
        if isinstance(command, click.Group):
            yield from (((name, inner), each) for inner, each in command.commands.items())


class Code(NamedTuple):
    """A span of code, or a line of a block of code."""

    text: str
    line: int


def read(path: Path) -> str:
    """Return the text of a document."""
    return path.read_text()


def code(text: str) -> Iterator[Code]:
    """Yield spans of code and lines of code blocks; diagrams and answers of a server are left out."""
    for block in _FENCE.finditer(text):
        if block[1] == "mermaid":
            continue
        first = text.count("\n", 0, block.start(2)) + 1
        for place, line in enumerate(block[2].replace("\\\n", "  ").split("\n")):
            yield Code(line, first + place)
    prose = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), text)
    for span in _SPAN.finditer(prose):
        yield Code(" ".join(span[1].split()), prose.count("\n", 0, span.start()) + 1)


def links(text: str) -> Iterator[str]:
    """Yield the targets of links and images that lie in this repository."""
    for link in _LINK.finditer(_SPAN.sub("", _FENCE.sub("", text))):
        target = link[1] or link[2]
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a document."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def paths(text: str) -> Iterator[str]:
    """Yield the paths of this repository that code names; placeholders in capitals are left out."""
    for span in code(text):
        for found in _PATH.finditer(span.text):
            path = found[0].rstrip(".")
            if not re.search(r"\b[A-Z]{3,}\b", path.removesuffix("README.md").removesuffix("NOTES.md")):
                yield path


def words_after(command: str, span: str) -> Iterator[list[str]]:
    """Yield the words behind each call of a command, up to a comment or pipe."""
    for found in re.finditer(rf"(?:^|(?<=[\s/]))(?<![\w-]){command}(?![\w-])([^#|;]*)", span):
        yield found[1].split()


def first_column(text: str, heading: str) -> list[str]:
    """Return the first column of the table under a heading."""
    _, _, section = text.partition(f"\n## {heading}\n")
    rows = [line for line in section.partition("\n## ")[0].split("\n") if line.startswith("|")]
    return [row.split("|")[1].strip() for row in rows[2:]]


def prose(text: str) -> Iterator[str]:
    """Yield the sentences of a document, without code blocks, tables, headings and comments."""
    text = re.sub(r"<!--.*?-->|^---\n.*?^---\n", "", _FENCE.sub("\n\n", text), flags=re.DOTALL | re.MULTILINE)
    kept = [line for line in text.split("\n") if not line.startswith(("|", "#", "    ", "<"))]
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(kept)):
        joined = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        yield from _SENTENCE_END.split(joined)
