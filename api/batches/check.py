"""Validation of the input of a batch, before any request of it begins."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from staged_pool.api.batches.records import BatchFault
from staged_pool.api.bulk.batch_lines import batch_reader
from staged_pool.api.bulk.text_file import check_encoding
from staged_pool.stages.foreign_text import BadText

MOST_LINES: Final = 50_000
"""Maximum number of requests in one batch, as at OpenAI."""

_MOST_FAULTS: Final = 20
"""Maximum number of faulty lines that a failed batch lists."""


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of a validation."""

    total: int
    """Number of requests, faulty ones included."""
    faults: tuple[BatchFault, ...]
    """Reasons why the batch cannot be run; empty if it can be."""


def check_input(path: Path) -> Checked:
    """Check that a file has requests, and not too many. Blocks.

    A faulty line among others is no reason against the batch: it fails alone.
    """
    try:
        check_encoding(path)
    except BadText as error:
        message = f"The file cannot be read: {error}"
        return Checked(0, (BatchFault(code="invalid_encoding", message=message),))
    reader = batch_reader(path)
    total = faulty = 0
    faults: list[BatchFault] = []
    try:
        while lines := reader.read():
            total += len(lines)
            for line in lines:
                if line.fault is None:
                    continue
                faulty += 1
                if len(faults) < _MOST_FAULTS:
                    faults.append(BatchFault(code=line.fault.code, message=line.fault.message, line=line.number + 1))
            if total > MOST_LINES:
                message = f"The file has more than {MOST_LINES} lines; split it into several batches"
                return Checked(total, (BatchFault(code="too_many_requests", message=message),))
    finally:
        reader.close()
    if not total:
        return Checked(0, (BatchFault(code="empty_file", message="The file has no lines; expected a request a line"),))
    return Checked(total, tuple(faults) if faulty == total else ())
