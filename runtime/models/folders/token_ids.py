"""Check of the numbers in the vocabulary files of a tokenizer.

The tokenizers library keeps a table as long as the largest id, and a lack of memory ends its process. So an id beyond
any vocabulary is rejected before the library reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from staged_pool.runtime.models.specs.json_file import JsonFile, shown
from staged_pool.stages.errors import ConfigError, shortened
from staged_pool.stages.foreign_file import BadFile, open_file

_FILES: Final = ("tokenizer.json", "vocab.json", "added_tokens.json")

_MOST: Final = 2**24
"""Most ids of a vocabulary: fifty times the largest that is published."""

_LONG: Final = re.compile(rb"[\s:\[,]-?\d{8,}+(?:[\s,\]}]|\Z)")
"""A whole number of eight digits or more, in or out of a text.

At the end of a piece, its beginning counts. Few files have one: the others are not decoded for it. Each attempt begins
at a mark, so no two of them read the same digits.
"""
_PIECE: Final = 2**20
"""Bytes that are searched in one step: the search holds the interpreter's lock."""
_BEGINNING: Final = 10
"""Bytes of a number that show its length."""


def check_token_ids(body: Path) -> None:
    """Reject vocabulary files with a number beyond any vocabulary.

    Args:
        body: Folder of the tokenizer.

    Raises:
        ConfigError: Names the file and the field, or the file that is no regular one or too large.
    """
    for name in _FILES:
        path = body / name
        try:
            if not _has_long(path):
                continue
        except FileNotFoundError:
            continue
        except (OSError, BadFile) as error:
            raise ConfigError(f"{name}: cannot be read: {error}") from error
        file = JsonFile.read(path, root=body)
        for field, number in _numbers(file.content if file is not None else None):
            if abs(number) > _MOST:
                raise ConfigError(f"{name}: {field}={shown(number)} must be between {-_MOST} and {_MOST}")


def _has_long(path: Path) -> bool:
    before = b""
    with open_file(path) as file:
        while piece := before + file.read(_PIECE):
            if len(piece) == len(before):
                return False
            if _LONG.search(piece):
                return True
            before = piece[-_BEGINNING:]
    return False


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, int]]:
    """Yield each whole number inside a value, with the fields that lead to it."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if isinstance(inner, dict | list | int):
                yield from _numbers(inner, f"{field}.{shortened(name)}" if field else shortened(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            if isinstance(inner, dict | list | int):
                yield from _numbers(inner, f"{field}[{place}]")
