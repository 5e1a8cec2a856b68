"""Settings of both clients."""

from __future__ import annotations

import math
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import random
from typing import Any, Final, Literal

import httpx

from staged_pool.client.errors import ConnectionFailed
from staged_pool.client.exchange import Ask, Exchange, NoAnswer, Request, exchange
from staged_pool.client.plans import Options
from staged_pool.client.retry import RetryPolicy
from staged_pool.runtime import arguments
from staged_pool.stages.errors import ConfigError, DeadlineExceeded, StagedPoolError

BASE_URL: Final = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Raises `ConfigError` for a value out of its range; see `Client` for the fields."""

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
            raise ConfigError("api_key: must be printable ASCII, and not empty")  # the key itself is nobody's to read
        for name in ("timeout_s", "attempt_timeout_s", "connect_timeout_s"):
            if not (value := getattr(self, name)) > 0:
                raise ConfigError(f"{name}={value!r}: must be above 0")
        for name in ("batch_items", "concurrency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 100_000:
                raise ConfigError(f"{name}={value!r}: must be between 1 and 100000")

    @property
    def options(self) -> Options:
        return Options(self.model, self.batch_items)

    def http(self) -> dict[str, Any]:
        """Arguments of httpx's clients; the transports come beside them."""
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return {"base_url": self.base_url, "headers": headers, "limits": self.limits, "verify": self._verify}

    @property
    def _verify(self) -> ssl.SSLContext | Literal[True]:
        """httpx reads the certificates of all authorities for each client, some 30 ms: not where there is no TLS."""
        return True if httpx.URL(self.base_url).scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @property
    def limits(self) -> httpx.Limits:
        return httpx.Limits(max_connections=None, max_keepalive_connections=self.concurrency)

    @property
    def socket_path(self) -> str | None:
        return None if self.unix_socket is None else os.fspath(self.unix_socket)

    def deadline(self, timeout_s: float | None, now: float) -> float:
        """Of a call that begins now.

        Raises:
            InvalidInput: `timeout_s` is no number of seconds above 0.
        """
        wanted = self.timeout_s if timeout_s is None else timeout_s
        arguments.time_limit(wanted)
        return now + wanted

    def exchange(self, request: Request, clock: Callable[[], float], deadline: float) -> Exchange:
        """See `exchange.exchange`."""
        return exchange(
            request,
            policy=self.retry,
            clock=clock,
            deadline=deadline,
            attempt_timeout_s=self.attempt_timeout_s,
            luck=random,
        )

    def check(self, deadline: float, now: float) -> None:
        """Raises `DeadlineExceeded` where a call has no time left."""
        if now >= deadline:
            raise DeadlineExceeded("The time was up before the last vector came", stage="client")

    def timeouts(self, ask: Ask) -> httpx.Timeout:
        """Of one try: no step of it may take longer than all of it."""
        left_s = None if math.isinf(ask.timeout_s) else ask.timeout_s
        return httpx.Timeout(left_s, connect=min(self.connect_timeout_s, ask.timeout_s), pool=None)


class Configured(ABC):
    """Settings of a client; for the arguments see `Client`."""

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
            base_url=base_url,
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
        """Make what carries the bytes."""


def failure(error: httpx.RequestError) -> NoAnswer:
    """Our error for one of httpx, where there is no answer."""
    said = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return NoAnswer("unreachable", said)
    return NoAnswer("timeout" if isinstance(error, httpx.TimeoutException) else "cut off", said)


def lost(error: httpx.RequestError) -> StagedPoolError:
    """Our error for one of httpx in the middle of an answer, of which some was used already."""
    if isinstance(error, httpx.TimeoutException):
        return DeadlineExceeded("The server fell silent in the middle of its answer", stage="client")
    return ConnectionFailed(f"The connection ended in the middle of the answer: {str(error) or type(error).__name__}")


def headers_of(response: httpx.Response) -> Mapping[str, str]:
    """By their names in lower case; of one that comes twice, the values in one."""
    return {name.lower(): value for name, value in response.headers.items()}


def _is_address(base_url: str) -> bool:
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError):
        return False
    return url.scheme in ("http", "https") and bool(url.host)
