"""Policy for retries: if and when a request is sent again. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from staged_pool.stages.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Policy for retries of requests that failed.

    Retried are rejections for overload (429), answers of a server that starts or drains (503), and failed connections.
    Requests change nothing on the server, so a request is also retried if its connection ends before the end of the
    answer. This is done only once, because the request may have crashed the server.

    Raises:
        ConfigError: A value is out of its range; the message names field, value and range.
    """

    retries: int = 4
    """Maximum retries after the first attempt. 0: every rejection is raised at once."""

    first_pause_s: float = 0.25
    """Pause before the first retry in seconds, if the server names none; each further pause is twice as long."""

    max_pause_s: float = 30.0
    """Maximum pause in seconds. If the server asks for a longer one, its rejection is raised."""

    def __post_init__(self) -> None:
        if not 0 <= self.retries <= 1000:
            raise ConfigError(f"retries={self.retries!r}: must be between 0 and 1000")
        for name in ("first_pause_s", "max_pause_s"):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise ConfigError(f"{name}={value!r}: must be above 0 and up to 86400")

    def pause_s(self, retry: int, *, retry_after_s: float | None, luck: float) -> float | None:
        """Return the pause before the next retry in seconds; None: do not retry.

        Args:
            retry: Number of retries so far.
            retry_after_s: `Retry-After` of the server in seconds; the pause is never shorter.
            luck: Random number from 0 to 1, so that clients that were rejected together do not retry together.
        """
        if retry >= self.retries or (retry_after_s or 0.0) > self.max_pause_s:
            return None
        spread_s = min(self.first_pause_s * 2.0 ** min(retry, 64), self.max_pause_s) / 2
        earliest_s = spread_s if retry_after_s is None else retry_after_s
        return min(earliest_s + luck * spread_s, self.max_pause_s)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return `Retry-After` in seconds; None if it is missing or invalid (RFC 9110, section 10.2.3).

    A date counts from the `Date` of the answer.

    Args:
        headers: Headers of the answer, by their names in lower case.
    """
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        until = _date(text)
        if until is None:
            return None
        seconds = (until - (_date(headers.get("date", "")) or datetime.now(UTC))).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
