"""Inputs of the one-shot commands: texts, files of images and videos, and lines of the standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import anyio
import click

from staged_pool.runtime.requests import Image, Video
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError, InvalidInput

T = TypeVar("T")

IMAGE_OPTION: Final = click.Option(
    ["--image"],
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="File of an image. Repeat it for several.",
)
VIDEO_OPTION: Final = click.Option(
    ["--video"],
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="File of a video (MP4, MOV, WebM or GIF), for a model that reads videos. Repeat it for several.",
)


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file of an image or a video."""

    kind: Literal["image", "video"]
    path: Path

    async def read(self) -> Image:
        """Return its content."""
        data = await anyio.Path(self.path).read_bytes()
        return Image(data) if self.kind == "image" else Video(data)


Given: TypeAlias = str | MediaFile
"""An input of a command: a text or a file."""


def lines_or_stdin(given: Sequence[str], name: str) -> list[str]:
    """Return the texts of the command line, or else the lines of the standard input.

    Args:
        given: Texts of the command line.
        name: Name of one of them, for the error.

    Raises:
        ConfigError: There are none, or they are not UTF-8; says how to give one.
    """
    for number, text in enumerate(given, start=1):
        check_argument(text, f"{name} {number}")
    lines = [*given] or _standard_input()
    if not any(lines):
        raise ConfigError(f"no {name}: give one as an argument, or one a line on the standard input")
    return lines


def _standard_input() -> list[str]:
    if sys.stdin is None:  # it was closed when the process began
        return []
    try:
        return foreign_text.lines_of(sys.stdin.buffer.read())
    except foreign_text.BadText as error:
        raise ConfigError(f"standard input: cannot be read: {error}") from None


def check_argument(text: str, name: str) -> None:
    """Check that a text of the command line is UTF-8; Python keeps other bytes of it as halves of surrogate pairs.

    Raises:
        ConfigError: It is not.
    """
    if fault := foreign_text.fault_of(text.encode(errors="surrogatepass")):
        raise ConfigError(f"{name}: cannot be read: {fault}")


def texts_and_files(texts: Sequence[str], images: Sequence[Path], videos: Sequence[Path] = ()) -> list[Given]:
    """Return the texts, then the files of images and of videos; the standard input is read if all are empty."""
    files: list[Given] = [
        *(MediaFile("image", path) for path in images),
        *(MediaFile("video", path) for path in videos),
    ]
    return files if files and not texts else [*lines_or_stdin(texts, "text"), *files]


async def read_files(given: Sequence[Given]) -> list[str | Image]:
    """Replace each file by the image or the video in it."""
    return [each if isinstance(each, str) else await each.read() for each in given]


@contextmanager
def errors_by_name(given: Sequence[Given], first: int) -> Iterator[None]:
    """Name the invalid input in an error: a file by its path, a text by its number, counted from `first`."""
    try:
        yield
    except InvalidInput as error:
        if error.index is None:
            raise
        wrong = given[error.index]
        name = f"input {first + error.index}" if isinstance(wrong, str) else str(wrong.path)
        raise type(error)(f"{name}: {error}", param=error.param, index=error.index) from error


def portions(given: Sequence[T], size: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield the inputs in lists of at most `size`, with the index of the first."""
    for first in range(0, len(given), max(1, size)):
        yield first, given[first : first + max(1, size)]
