"""Blocks of code in the documents for users, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.packaging.floors import ROOT

PAGES: Final = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK: Final = re.compile(
    r"^(?:<!-- not run: (?P<reason>.*?) -->\n+)?(?P<indent> *)```(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """One block of code."""

    page: Path
    line: int
    language: str
    text: str
    reason: str
    """Reason for not running it, from the comment above it; empty: it runs."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Sequence[Block]:
    """Return the blocks of a page."""
    text = page.read_text()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE),
            found["reason"] or "",
        )
        for found in _BLOCK.finditer(text)
    ]


class Command(NamedTuple):
    """A command of a console, and the lines that it prints."""

    words: Sequence[str]
    """Without comments, redirections and variables in front."""
    environment: dict[str, str]
    printed: Sequence[str]


def commands(block: Block) -> Iterator[Command]:
    """Yield the commands of a console: each begins behind a dollar sign."""
    lines = block.text.splitlines()
    while lines:
        line = lines.pop(0)
        assert line.startswith("$ "), f"{block.place}: {line!r} belongs to no command"
        line = line.removeprefix("$ ")
        while (words := _words(line)) is None or line.endswith("\\"):
            line = f"{line.removesuffix(chr(92))} {lines.pop(0)}" if words is not None else f"{line}\n{lines.pop(0)}"
        printed = []
        while lines and not lines[0].startswith("$ "):
            printed.append(lines.pop(0))
        environment = {}
        while words and (given := re.fullmatch(r"([A-Z_]+)=(.*)", words[0], re.DOTALL)):
            environment[given[1]] = given[2]
            words = words[1:]
        yield Command(_without_redirections(words), environment, printed)


def _words(line: str) -> list[str] | None:
    """Return the words of a line; None if a quotation goes on in the next line."""
    try:
        return shlex.split(line.removesuffix("\\"), comments=True)
    except ValueError:
        return None


def _without_redirections(words: list[str]) -> list[str]:
    if words[-1:] == ["&"]:
        words = words[:-1]
    for sign in (">", "2>"):
        if sign in words:
            place = words.index(sign)
            words = words[:place] + words[place + 2 :]
    assert "|" not in words, f"{words}: a pipe is not understood"
    return words
