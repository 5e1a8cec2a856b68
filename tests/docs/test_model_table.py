"""The table of models ticks only what a test compares with an oracle."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.floors import ROOT

PAGE = ROOT / "docs/model-table.md"
FIELDS = ["family", "read from", "ours", "vLLM", "TEI", "Infinity", "SIE", "SGLang"]
OURS = re.compile(r"\[(?:✓|plugin)\]\((\.\./tests/[\w/]+/test_\w+\.py)\)|–")
THEIRS = {"✓", "(✓)", "~", "–", "?"}


def rows(text: str) -> Iterator[list[str]]:
    """Cells of each row of the tables that compare."""
    compares = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells == FIELDS:
            compares = True
        elif not cells:
            compares = False
        elif compares and set(line) - set("|-"):
            yield cells


def wrong(text: str, page: Path = PAGE) -> list[str]:
    """Families whose row is malformed, or whose tick names no test with an oracle."""
    found = []
    for cells in rows(text):
        ours = OURS.fullmatch(cells[2]) if len(cells) == len(FIELDS) else None
        named = None if ours is None or ours[1] is None else (page.parent / ours[1]).resolve()
        has_oracle = named is None or (named.is_file() and "oracle" in named.read_text().lower())
        if ours is None or not has_oracle or not THEIRS.issuperset(cells[3:]):
            found.append(cells[0])
    return found


def test_each_tick_of_ours_names_a_test_with_an_oracle() -> None:
    text = PAGE.read_text()
    families = [cells[0] for cells in rows(text)]
    assert len(families) >= 60
    assert len(set(families)) == len(families)
    assert wrong(text) == []


@pytest.mark.parametrize(
    "row",
    [
        "| BERT | `BertModel` | ✓ | ✓ | ✓ | ✓ | ✓ | ✓ |",
        "| BERT | `BertModel` | [✓](../tests/models/test_nothing.py) | ✓ | ✓ | ✓ | ✓ | ✓ |",
        "| BERT | `BertModel` | [✓](../tests/packaging/test_wheel.py) | ✓ | ✓ | ✓ | ✓ | ✓ |",
        "| BERT | `BertModel` | – | yes | ✓ | ✓ | ✓ | ✓ |",
        "| BERT | `BertModel` | – | ✓ | ✓ | ✓ | ✓ |",
    ],
    ids=["bare", "no-file", "no-oracle", "word", "short"],
)
def test_a_wrong_row_is_found(row: str) -> None:
    assert wrong(f"| {' | '.join(FIELDS)} |\n|---|---|---|---|---|---|---|\n{row}\n") == ["BERT"]
