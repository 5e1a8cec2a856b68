"""Settings of both clients."""

from __future__ import annotations

import math
import os
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from random import random
from typing import Any, Final, Literal
from urllib.request import getproxies, proxy_bypass

import httpx

from staged_pool.client.errors import ConnectionFailed
from staged_pool.client.exchange import Attempt, Exchange, NoAnswer, ServerRequest, exchange
from staged_pool.client.plans import CallDefaults
from staged_pool.client.retry import RetryPolicy
from staged_pool.runtime import arguments
from staged_pool.runtime.own_names import OwnNames
from staged_pool.stages.errors import ConfigError, DeadlineExceeded, StagedPoolError

BASE_URL: Final = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a client; see `Client` for the fields.

    Raises:
        ConfigError: A value is out of its range.
    """

    base_url: str
    unix_socket: str | os.PathLike[str] | None
    api_key: str | None = field(repr=False)
    model: str | None
    timeout_s: float
    attempt_timeout_s: float
    connect_timeout_s: float
    retry: RetryPolicy
    batch_items: int
    concurrency: int

    def __post_init__(self) -> None:
        if not _is_address(self.base_url):
            raise ConfigError("base_url: must be an http or https address, such as http://127.0.0.1:8000")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key: must be printable ASCII, and not empty")  # without the key, which is secret
        for name in ("timeout_s", "attempt_timeout_s", "connect_timeout_s"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name}={value!r}: must be above 0")
        for name in ("batch_items", "concurrency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
                raise ConfigError(f"{name}={value!r}: must be between 1 and 100000")

    @property
    def call_defaults(self) -> CallDefaults:
        return CallDefaults(self.model, self.batch_items)

    def http(self) -> dict[str, Any]:
        """Return the arguments of httpx's clients, without the transport."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.base_url, "headers": headers, "limits": self.limits, "verify": self._verify}

    @property
    def _verify(self) -> ssl.SSLContext | Literal[True]:
        """TLS context; without TLS an empty one, because httpx takes about 30 ms to load the CA certificates."""
        return True if httpx.URL(self.base_url).scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def limits(self) -> httpx.Limits:
        return httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)

    @property
    def socket_path(self) -> str | None:
        return None if self.unix_socket is None else os.fspath(self.unix_socket)

    def proxy_note(self) -> str:
        """Return a hint for an error, if the environment sends requests through a proxy; else an empty text."""
        url, variables = httpx.URL(self.base_url), getproxies()
        name = next((name for name in (url.scheme, "all") if variables.get(name)), None)
        if self.unix_socket is not None or name is None or proxy_bypass(url.host):
            return ""
        return f"; {name.upper()}_PROXY names a proxy: without one, put {url.host} into NO_PROXY"

    def deadline(self, timeout_s: float | None, now: float) -> float:
        """Return the deadline of a call that begins now.

        Raises:
            InvalidInput: `timeout_s` is not a number above 0.
        """
        wanted = self.timeout_s if timeout_s is None else timeout_s
        arguments.time_limit(wanted)
        return now + wanted

    def exchange(self, request: ServerRequest, clock: Callable[[], float], deadline: float) -> Exchange:
        """Start an exchange with these settings; see `exchange.exchange`."""
        return exchange(
            request,
            policy=self.retry,
            clock=clock,
            deadline=deadline,
            attempt_timeout_s=self.attempt_timeout_s,
            luck=random,
        )

    def check(self, deadline: float, now: float) -> None:
        """Check the deadline of a stream.

        Raises:
            DeadlineExceeded: The deadline has passed.
        """
        if now >= deadline:
            raise DeadlineExceeded("The deadline passed before the last vector arrived", stage="client")

    def timeouts(self, attempt: Attempt) -> httpx.Timeout:
        """Return the timeouts of one attempt; each of its steps has the limit of the attempt."""
        left_s = None if math.isinf(attempt.timeout_s) else attempt.timeout_s
        return httpx.Timeout(left_s, connect=min(self.connect_timeout_s, attempt.timeout_s), pool=None)


_SETTINGS: Final = tuple(setting.name for setting in fields(Settings))


class BaseClient(OwnNames, ABC):
    """Base of both clients: their arguments, see `Client`."""

    _instead = dict.fromkeys(_SETTINGS, "settings are arguments of the client, and it keeps them")

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        unix_socket: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = math.inf,
        attempt_timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
        retry: RetryPolicy | None = None,
        batch_items: int = 128,
        concurrency: int = 4,
    ) -> None:
        self._settings = Settings(
            base_url=_without_version(base_url),
            unix_socket=unix_socket,
            api_key=api_key,
            model=model,
            timeout_s=timeout_s,
            attempt_timeout_s=attempt_timeout_s,
            connect_timeout_s=connect_timeout_s,
            retry=retry or RetryPolicy(),
            batch_items=batch_items,
            concurrency=concurrency,
        )
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make the HTTP client."""


def failure(error: httpx.RequestError, settings: Settings) -> NoAnswer:
    """Convert an httpx error before the answer to an outcome."""
    message = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return NoAnswer("unreachable", f"{message}{settings.proxy_note()}")
    return NoAnswer("timeout" if isinstance(error, httpx.TimeoutException) else "cut off", message)


def lost(error: httpx.RequestError) -> StagedPoolError:
    """Convert an httpx error in the middle of a streamed answer, which cannot be retried."""
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded("The server sent nothing more in the middle of its answer", stage="client")
    return ConnectionFailed(f"The connection ended in the middle of the answer: {str(error) or type(error).__name__}")


def headers_of(response: httpx.Response) -> Mapping[str, str]:
    """Return the headers by their names in lower case; repeated ones are joined."""
    return {name.lower(): value for name, value in response.headers.items()}


def _without_version(base_url: str) -> str:
    """Remove a `/v1` at the end of an address: clients of OpenAI's routes want it, and this one adds it."""
    return re.sub(r"/v1/?$", "", base_url)


def _is_address(base_url: str) -> bool:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        return False
    return url.scheme in ("http", "https") and bool(url.host)
