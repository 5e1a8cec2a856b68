"""Files of a model folder that `git lfs` has not fetched: a pointer of three lines is in the place of each."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from staged_pool.stages.errors import ConfigError

POINTER: Final = b"version https://git-lfs"
"""Beginning of a pointer."""


def check_fetched(path: Path, name: str) -> None:
    """Reject the pointer of a file.

    Args:
        path: The file.
        name: Its name in error messages.

    Raises:
        ConfigError: It is a pointer; says how to fetch the file.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        check_content(file.read(len(POINTER)), name)


def check_content(content: bytes, name: str) -> None:
    """Reject the pointer of a file by its content; see `check_fetched`."""
    if content.startswith(POINTER):
        raise ConfigError(f"{name}: is a Git LFS pointer, not the file: fetch it with `git lfs pull`")
