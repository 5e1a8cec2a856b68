"""The collector that traces go to: its URL, checked and completed."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from staged_pool.stages.errors import ConfigError

TRACES_PATH: Final = "/v1/traces"
"""Path of a collector that the setting may leave out."""


def check_endpoint(endpoint: str) -> None:
    """Check the URL of a collector.

    Raises:
        ConfigError: It is no URL of http or https, or it has a user or a password.
    """
    try:
        parts = urlsplit(endpoint)
        is_wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:
        is_wrong = True
    if is_wrong:
        raise ConfigError(f"trace_endpoint={endpoint!r}: must be a URL such as http://localhost:4318")
    if "@" in parts.netloc:
        raise ConfigError("trace_endpoint=(not shown): give credentials in the variable OTEL_EXPORTER_OTLP_HEADERS")


def traces_url(endpoint: str) -> str:
    """Return the full URL of a collector's receiver: a URL without a path gets the usual one."""
    parts = urlsplit(endpoint)
    return parts._replace(path=TRACES_PATH).geturl() if parts.path in ("", "/") else endpoint


def shown(endpoint: str) -> str:
    """Return the scheme, the host and the port of a collector, for the log."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc}"
