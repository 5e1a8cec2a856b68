"""Facts that only the model card (README.md) of a folder states."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Final

from staged_pool.stages.foreign_file import BadFile, open_file

_READ_BYTES: Final = 64 * 1024
_MATRYOSHKA_TAGS: Final = frozenset({"loss:MatryoshkaLoss", "loss:Matryoshka2dLoss"})
"""Tags that sentence-transformers gives a model trained with a Matryoshka loss."""

_EMBEDDING_FIELDS: Final = frozenset(
    f"{field}: {value}"
    for field, values in (
        ("pipeline_tag", ("feature-extraction", "sentence-similarity")),
        ("library_name", ("sentence-transformers",)),
    )
    for value in values
)
_EMBEDDING_TAGS: Final = frozenset({"feature-extraction", "sentence-similarity"})


def trained_with_matryoshka(folder: Path) -> bool:
    """True if the tags of the model card name a Matryoshka loss.

    Only the front matter counts: YAML with one tag per line. A missing or unreadable card counts as no tag.
    """
    return any(line.strip().removeprefix("-").strip(" \"'") in _MATRYOSHKA_TAGS for line in front_matter(folder))


def is_embedding_model(folder: Path) -> bool:
    """True if the model card describes an embedding model."""
    lines = [line.strip() for line in front_matter(folder)]
    if any(line.startswith("pipeline_tag:") and "text-ranking" in line for line in lines):
        return False
    tags = {line.removeprefix("-").strip(" \"'") for line in lines if line.startswith("-")}
    return bool(tags & _EMBEDDING_TAGS or _EMBEDDING_FIELDS.intersection(line.replace('"', "") for line in lines))


def model_card(folder: Path) -> str:
    """The first 64 KiB of the model card; empty if there is none."""
    try:
        with open_file(folder / "README.md", None) as file:
            return file.read(_READ_BYTES).decode(errors="replace").removeprefix("\ufeff")
    except (OSError, BadFile):
        return ""


def front_matter(folder: Path) -> list[str]:
    """The lines between the first two `---` lines; empty if the card does not begin with `---`."""
    lines = model_card(folder).splitlines()
    if not lines or lines[0].rstrip() != "---":
        return []
    return list(takewhile(lambda line: line.rstrip() != "---", lines[1:]))
