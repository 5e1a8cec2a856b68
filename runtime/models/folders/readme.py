"""Read what only the model card of a folder (its README.md) says."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 64 * 1024
_MATRYOSHKA_TAGS: Final = frozenset({"loss:MatryoshkaLoss", "loss:Matryoshka2dLoss"})
"""What sentence-transformers tags a model with that was trained with one of these losses."""

_EMBEDDING_FIELDS: Final = frozenset(
    f"{field}: {value}"
    for field, values in (
        ("pipeline_tag", ("feature-extraction", "sentence-similarity")),
        ("library_name", ("sentence-transformers",)),
    )
    for value in values
)
_EMBEDDING_TAGS: Final = frozenset({"feature-extraction", "sentence-similarity"})


def trained_for_shorter_vectors(folder: Path) -> bool:
    """Whether the tags of the model card say that vectors may be cut.

    Only the front matter counts, which is YAML of one tag a line. A card that is missing or cannot be read says
    nothing.
    """
    return any(line.strip().removeprefix("-").strip(" \"'") in _MATRYOSHKA_TAGS for line in front_matter(folder))


def is_of_embeddings(folder: Path) -> bool:
    """Whether the model card calls the model one for embeddings."""
    lines = [line.strip() for line in front_matter(folder)]
    if any(line.startswith("pipeline_tag:") and "text-ranking" in line for line in lines):
        return False
    tags = {line.removeprefix("-").strip(" \"'") for line in lines if line.startswith("-")}
    return bool(tags & _EMBEDDING_TAGS or _EMBEDDING_FIELDS.intersection(line.replace('"', "") for line in lines))


def model_card(folder: Path) -> str:
    """The text of the model card, of which the first 64 KiB are read; empty where there is none."""
    try:
        with (folder / "README.md").open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace").removeprefix("\ufeff")
    except OSError:
        return ""


def front_matter(folder: Path) -> list[str]:
    """The lines between the first two that are `---`; none where the card begins with anything else."""
    lines = model_card(folder).splitlines()
    if not lines or lines[0].rstrip() != "---":
        return []
    return list(takewhile(lambda line: line.rstrip() != "---", lines[1:]))
