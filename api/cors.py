"""CORS for pages of other origins, and checks of its settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from staged_pool.api.asgi import App, Message, Receive, Scope, Send
from staged_pool.stages.errors import ConfigError

CORS_METHODS: Final = ("GET", "HEAD", "POST", "DELETE")
EXPOSED: Final = (
    "x-request-id", "server-timing", "retry-after", "metadata", "x-ignored-fields",
    "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time", "x-compute-tokens",
)  # fmt: skip
"""Response headers that a page may read."""

PREFLIGHT_S: Final = 600
"""Seconds for which a browser caches the answer to a preflight."""

_ORIGIN: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?"
)
_WITHOUT_HOST: Final = ("*", "null", "file://")
"""All origins; that of pages which hide theirs; that of files in some applications."""

_USUAL_PORTS: Final = {"http": "80", "https": "443"}
_PRIVATE_NETWORK: Final = b"access-control-request-private-network"
_ROOT_PATH: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")


def is_preflight(scope: Scope) -> bool:
    """Tell if a request is a browser's CORS preflight, which has no key."""
    if scope["method"] != "OPTIONS":
        return False
    names = {name for name, _ in scope["headers"]}
    return b"origin" in names and b"access-control-request-method" in names


def cors(app: App, origins: Sequence[str]) -> App:
    """Wrap `app` with CORS for pages of these origins.

    Cookies are not allowed, and have no effect: a page must have a key. A page of the internet that asks whether it may
    reach a server in a private network gets the answer of its origin.
    """
    from starlette.middleware.cors import CORSMiddleware

    inner = CORSMiddleware(
        app,
        allow_origins=[as_sent(origin) for origin in origins],
        allow_methods=CORS_METHODS,
        allow_headers=["*"],  # client libraries in browsers add headers of their own
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and any(name == _PRIVATE_NETWORK for name, _ in scope["headers"])
        if not asks or not is_preflight(scope):
            await inner(scope, receive, send)
            return

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 200:
                headers = [*message["headers"], (b"access-control-allow-private-network", b"true")]
                message = {**message, "headers": headers}
            await send(message)

        # Older starlettes do not know the question, and newer ones reject it unless they are told.
        headers = [(name, value) for name, value in scope["headers"] if name != _PRIVATE_NETWORK]
        await inner({**scope, "headers": headers}, receive, send_more)

    return answer


def as_sent(origin: str) -> str:
    """Return an origin as browsers send it: hosts of the web in lower case, without the usual port."""
    found = _ORIGIN.fullmatch(origin)
    if found is None or found["scheme"] not in _USUAL_PORTS:
        return origin
    port = "" if found["port"] in (None, _USUAL_PORTS[found["scheme"]]) else f":{found['port']}"
    return f"{found['scheme']}://{found['host'].lower()}{port}"


def check_origins(origins: Sequence[str]) -> None:
    """Check that all origins have the form of an `Origin` header.

    Raises:
        ConfigError: One has not; the message has the expected form.
    """
    for origin in origins:
        if origin not in _WITHOUT_HOST and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origin={origin!r}: expected scheme://host, scheme://host:port, null, file://, or * for all"
            )


def check_root_path(root_path: str) -> None:
    """Check that `root_path` is a prefix of paths.

    Raises:
        ConfigError: It is not; the message has the expected form.
    """
    if not _ROOT_PATH.fullmatch(root_path):
        raise ConfigError(f"root_path={root_path!r}: expected a path such as /pool, without a slash at the end")
