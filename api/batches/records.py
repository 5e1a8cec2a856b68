"""Files and batches as they are kept, and as OpenAI's clients see them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Final, Literal, TypeAlias, get_args

from staged_pool.stages.errors import InvalidInput

DAY_S: Final = 86_400
KEPT_S: Final = 30 * DAY_S
"""Seconds that a file is kept, if its upload does not say; and a batch after its end."""

WINDOW_MOST_S: Final = 7 * DAY_S
"""Longest completion window, in seconds."""

_WINDOW: Final = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}

Purpose: TypeAlias = Literal["batch", "batch_output"]
Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
ENDED: Final[frozenset[Status]] = frozenset({"failed", "completed", "expired", "cancelled"})
"""Statuses that a batch never leaves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file."""

    id: str
    owner: str
    """Owner of the file; nobody else sees it."""
    filename: str
    """Name that the client gave. It is shown, and never a path."""
    purpose: Purpose
    size: int
    """Bytes of the content."""
    created_at: int
    """Unix time in seconds, as all times here."""
    order: int
    """Unix time in nanoseconds, for the order of lists."""
    expires_at: int

    def shown(self) -> dict[str, object]:
        """Return the object that clients read."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFault:
    """Reason why a batch failed."""

    code: str
    message: str
    line: int | None = None
    """Line of the input, from 1; None if it is about the whole file."""
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch."""

    id: str
    owner: str
    """Owner of the batch; nobody else sees it."""
    tenant: str | None
    """Tenant that its requests count for."""
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    created_at: int
    order: int
    """Unix time in nanoseconds, for the order of lists."""
    expires_at: int
    """Time from which on no further request of it begins."""
    output_expires_s: int = KEPT_S
    """Seconds that its output is kept."""
    output_id: str
    """Id of its output, which is a file once the batch has ended."""
    errors_id: str
    """Id of the file of its failed requests, likewise."""
    status: Status = "validating"
    times: Mapping[Status, int] = field(default_factory=dict)
    """Time at which it got each status."""
    ending: Status | None = None
    """The status after `finalizing`; None before."""
    faults: tuple[BatchFault, ...] = ()
    """Reasons of the status `failed`."""
    total: int = 0
    """Requests in the input; 0 until it is validated."""
    completed: int = 0
    failed: int = 0
    """Requests that were answered with an error, or not begun in time."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """True if the batch will not change any more."""
        return self.status in ENDED

    @property
    def begins_anew(self) -> bool:
        """True if a run without anything of an earlier one gives the same: the batch was never to end early."""
        return not self.times.keys() & {"finalizing", "cancelling"}

    def shown(self) -> dict[str, object]:
        """Return the object that clients read."""
        faults = [
            {"code": fault.code, "message": fault.message, "line": fault.line, "param": fault.param}
            for fault in self.faults
        ]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in STATUSES if status != "validating"},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_file_id() -> str:
    """Return a random id of a file."""
    return f"file-{token_hex(16)}"


def new_batch_id() -> str:
    """Return a random id of a batch."""
    return f"batch_{token_hex(16)}"


def window_s(text: str) -> int:
    """Return the seconds of a completion window.

    Raises:
        InvalidInput: It is not a number with a unit, or too long.
    """
    match = _WINDOW.fullmatch(text)
    seconds = 0 if match is None else int(match[1]) * _UNITS[match[2]]
    if not 0 < seconds <= WINDOW_MOST_S:
        message = "completion_window: expected a number of s, m, h or d up to 7 days, such as 24h"
        raise InvalidInput(message, param="completion_window")
    return seconds
