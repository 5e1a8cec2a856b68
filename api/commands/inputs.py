"""Inputs of the one-shot commands: texts, files of images, and lines of the standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import anyio
import click

from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import ConfigError, InvalidInput

T = TypeVar("T")

IMAGE_OPTION: Final = click.Option(
    ["--image"],
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="File of an image. Repeat it for several.",
)


def lines_or_stdin(given: Sequence[str], name: str) -> list[str]:
    """Return the texts of the command line, or else the lines of the standard input.

    Args:
        given: Texts of the command line.
        name: Name of one of them, for the error.

    Raises:
        ConfigError: There are none; says how to give one.
    """
    lines = [*given] or [line.rstrip("\r\n") for line in sys.stdin]
    if not any(lines):
        raise ConfigError(f"no {name}: give one as an argument, or one a line on the standard input")
    return lines


def texts_and_images(texts: Sequence[str], images: Sequence[Path]) -> list[str | Path]:
    """Return the texts, then the files of images; the standard input is read if both are empty."""
    return [*images] if images and not texts else [*lines_or_stdin(texts, "text"), *images]


async def read_images(given: Sequence[str | Path]) -> list[str | Image]:
    """Replace each file by the image in it."""
    return [each if isinstance(each, str) else Image(await anyio.Path(each).read_bytes()) for each in given]


@contextmanager
def errors_by_name(given: Sequence[str | Path], first: int) -> Iterator[None]:
    """Name the invalid input in an error: an image by its file, a text by its number, counted from `first`."""
    try:
        yield
    except InvalidInput as error:
        if error.index is None:
            raise
        wrong = given[error.index]
        name = f"input {first + error.index}" if isinstance(wrong, str) else str(wrong)
        raise type(error)(f"{name}: {error}", param=error.param, index=error.index) from error


def portions(given: Sequence[T], size: int) -> Iterator[tuple[int, Sequence[T]]]:
    """Yield the inputs in lists of at most `size`, with the index of the first."""
    for first in range(0, len(given), max(1, size)):
        yield first, given[first : first + max(1, size)]
