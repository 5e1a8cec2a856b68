"""Tables of the findings of `python -m perf.gpu right`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import numpy as np

from perf.gpu.findings import Finding
from perf.gpu.tiny_models import AGAINST_COMPANY, WAYS
from perf.tools import report

_COLUMNS: Final = (*WAYS, AGAINST_COMPANY)
_SHOWN: Final = 20
"""Most lines about wrong results; all of them are in the file."""
_CHARACTERS: Final = 220
"""Most characters of such a line."""


def show(findings: Sequence[Finding]) -> None:
    """Print the differences of tiny models, then all other findings, then the wrong ones."""
    cells: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    others: list[Finding] = []
    for finding in findings:
        dtype, _, way = finding.way.partition(", ")
        if way in WAYS and finding.difference is not None:
            cells[finding.model, dtype].append(finding)
        else:
            others.append(finding)
    rows = [
        [f"{model}, {dtype}", f"{own[0].bound:g}", *(_largest(own, column) for column in _COLUMNS), _verdict(own)]
        for (model, dtype), own in cells.items()
    ]
    note = "Each number is the largest difference of all outputs, inputs and batches."
    report.show_table("Tiny models, against float32 on the CPU", ["", "bound", *_COLUMNS, "right"], rows, note=note)
    rest = [[_shortened(finding.line()), _verdict([finding])] for finding in others]
    report.show_table("Served models, and ways that are not in use", ["", "right"], rest)
    wrong = [finding for finding in findings if not finding.right]
    for line in _wrong_lines(wrong):
        report.console.print(line, soft_wrap=True, markup=False)
    report.console.print(f"{len(findings)} checks, {len(wrong)} wrong")


def _largest(findings: Sequence[Finding], column: str) -> str:
    """Return the largest difference of a column; NaN is above all."""
    values = [
        finding.difference for finding in findings if finding.difference is not None and column == _column_of(finding)
    ]
    return f"{np.max(values):.2g}" if values else "-"


def _column_of(finding: Finding) -> str:
    return AGAINST_COMPANY if finding.subject.endswith(AGAINST_COMPANY) else finding.way.partition(", ")[2]


def _verdict(findings: Sequence[Finding]) -> str:
    return "yes" if all(finding.right for finding in findings) else "NO"


def _wrong_lines(wrong: Sequence[Finding]) -> list[str]:
    """Return one line for each model and way with wrong results."""
    ways: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in wrong:
        ways[finding.model, finding.way].append(finding)
    lines = [
        f"WRONG: {_shortened(own[0].line())}" + (f" (and {len(own) - 1} more)" if len(own) > 1 else "")
        for own in ways.values()
    ]
    return [*lines[:_SHOWN], *([f"... and {len(lines) - _SHOWN} more ways"] if len(lines) > _SHOWN else [])]


def _shortened(line: str) -> str:
    return line if len(line) <= _CHARACTERS else f"{line[: _CHARACTERS - 1]}…"
