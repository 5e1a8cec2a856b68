"""CORS for pages of other origins, and checks of its settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from staged_pool.api.asgi import App, Scope
from staged_pool.stages.errors import ConfigError

CORS_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
EXPOSED: Final = (
    "x-request-id", "server-timing", "retry-after", "metadata", "x-ignored-fields",
    "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time", "x-compute-tokens",
)  # fmt: skip
"""Response headers that a page may read."""

PREFLIGHT_S: Final = 600
"""Seconds for which a browser caches the answer to a preflight."""

_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_ROOT_PATH: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def is_preflight(scope: Scope) -> bool:
    """Tell if a request is a browser's CORS preflight, which has no key."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


def cors(app: App, origins: Sequence[str]) -> App:
    """Wrap `app` with CORS for pages of these origins.

    Cookies are not allowed, and have no effect: a page must have a key.
    """
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=CORS_METHODS,
        allow_headers=["*"],  # client libraries in browsers add headers of their own
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )


def check_origins(origins: Sequence[str]) -> None:
    """Check that all origins have the form of an `Origin` header.

    Raises:
        ConfigError: One has not; the message has the expected form.
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors_origin={origin!r}: expected scheme://host, scheme://host:port, or *")


def check_root_path(root_path: str) -> None:
    """Check that `root_path` is a prefix of paths.

    Raises:
        ConfigError: It is not; the message has the expected form.
    """
    if not _ROOT_PATH.fullmatch(root_path):
        raise ConfigError(f"root_path={root_path!r}: expected a path such as /pool, without a slash at the end")
