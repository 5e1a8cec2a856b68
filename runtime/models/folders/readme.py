"""Read what only the model card of a folder (its README.md) says."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 64 * 1024
_MATRYOSHKA_TAGS: Final = frozenset({"loss:MatryoshkaLoss", "loss:Matryoshka2dLoss"})
"""What sentence-transformers tags a model with that was trained with one of these losses."""


def trained_for_shorter_vectors(folder: Path) -> bool:
    """Whether the tags of the model card say that vectors may be cut.

    Only the front matter counts, which is YAML of one tag a line. A card that is missing or cannot be read says
    nothing.
    """
    return any(line.strip().removeprefix("-").strip(" \"'") in _MATRYOSHKA_TAGS for line in _front_matter(folder))


def _front_matter(folder: Path) -> list[str]:
    """The lines between the first two that are `---`; none where the card begins with anything else."""
    try:
        with (folder / "README.md").open("rb") as file:
            lines = file.read(_READ_BYTES).decode(errors="replace").removeprefix("\ufeff").splitlines()
    except OSError:
        return []
    if not lines or lines[0].rstrip() != "---":
        return []
    return list(takewhile(lambda line: line.rstrip() != "---", lines[1:]))
