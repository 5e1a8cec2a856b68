"""Origins whose pages may read answers, and the prefix of a proxy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from staged_pool.api.asgi import App, Scope
from staged_pool.stages.errors import ConfigError

METHODS: Final = ("GET", "HEAD", "POST")
EXPOSED: Final = (
    "x-request-id", "server-timing", "retry-after", "metadata",
    "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time", "x-compute-tokens",
)  # fmt: skip
"""Headers of our answers that a page may read."""

PREFLIGHT_S: Final = 600
"""How long a browser need not ask again."""

_ORIGIN: Final = re.compile(r"https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?|https?://\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
_ROOT_PATH: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def is_preflight(scope: Scope) -> bool:
    """Whether a browser asks, on behalf of a page, what it may send; it sends no key with that."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


def cors(app: App, origins: Sequence[str]) -> App:
    """`app`, whose answers pages of these origins may read, and which answers their preflights.

    Cookies play no part here, and are not allowed: a page must know a key.
    """
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=["*"],  # clients in browsers bring headers of their own
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what no browser would send as `Origin`.

    Raises:
        ConfigError: Names it and what would be right.
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"cors_origin={origin!r}: expected scheme://host or scheme://host:port, or *")


def check_root_path(root_path: str) -> None:
    """Refuse what is no prefix of paths.

    Raises:
        ConfigError: Says what would be right.
    """
    if not _ROOT_PATH.fullmatch(root_path):
        raise ConfigError(f"root_path={root_path!r}: expected /segments, with no slash at the end")
