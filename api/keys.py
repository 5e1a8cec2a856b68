"""API keys and tenants, checked by a request's headers before its body is read."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from staged_pool.api import status
from staged_pool.api.asgi import Scope
from staged_pool.api.status import Problem
from staged_pool.stages import foreign_text
from staged_pool.stages.errors import ConfigError

OPEN: Final = frozenset(
    {
        *("/health", "/ready", "/ping", "/v1/health/live", "/v1/health/ready"),
        *("/.well-known/live", "/.well-known/ready"),
    }
)
"""Paths of probes, which need no key. Every other path needs one, even a path that does not exist."""

ADMIN: Final = "/admin"
"""Path of the routes by which operators change a running server. They have keys of their own."""

TENANT: Final = "staged_pool.tenant"
"""Key in a scope: the tenant of the request."""

OWNER: Final = "staged_pool.owner"
"""Key in a scope: the owner of what a request stores, which stands for the same key or name as the tenant.

It is too long for two names to have the same one by intent.
"""

KEY_LIMIT: Final = 4096

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")  # RFC 9110, section 5.6.2
_KEY: Final = re.compile(r"[!-~]+")
_BEARER: Final = re.compile(rb"bearer +(?P<key>[^ ]+) *", re.IGNORECASE)  # RFC 9110, section 11.4
_AZURE_HEADER: Final = b"api-key"
"""Header with the bare key, as clients of Azure send it. `Authorization` takes precedence."""
_Digests: TypeAlias = Mapping[bytes, tuple[str, str]]
"""Tenant and owner of each key by its hash."""
_HOW_TO_SEND: Final = "send one as `Authorization: Bearer <key>`"


class Keys:
    """The API keys of one server, of which only hashes are kept.

    Args:
        keys: The keys. Without any, no request needs a key.
        tenant_header: Name of the header with the tenant, which replaces the key as tenant. None: no header.
        admin_keys: The keys of operators, for paths below `ADMIN` alone. Other keys do not open these.
    """

    def __init__(
        self, keys: Iterable[str] = (), tenant_header: str | None = None, admin_keys: Iterable[str] = ()
    ) -> None:
        self._digests = _digests(keys)
        self._admin_digests = _digests(admin_keys)
        self._tenant_header = None if tenant_header is None else tenant_header.lower().encode()

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, scope: Scope) -> Problem | None:
        """Return the problem of a request without a valid key. None: it is admitted, and its scope has its tenant.

        Args:
            scope: Scope of the request, whose path has no prefix of a proxy.
        """
        if scope["path"] in OPEN:
            return None
        known = self._admin_digests if self._admin_digests and is_admin(scope["path"]) else self._digests
        if known and (problem := _check(scope, known)) is not None:
            return problem
        if self._tenant_header is not None:
            given = [value for name, value in scope["headers"] if name == self._tenant_header]
            if given or TENANT not in scope:
                scope[TENANT], scope[OWNER] = _identity(b", ".join(given))
        return None


def _check(scope: Scope, known: _Digests) -> Problem | None:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    bare = [value.strip() for name, value in scope["headers"] if name == _AZURE_HEADER and not given]
    if not given and not bare:
        return Problem(kind=status.UNAUTHORIZED, message=f"An API key is required; {_HOW_TO_SEND}")
    bearer = _BEARER.fullmatch(given[0]) if given else None
    if len(given) + len(bare) > 1 or (given and bearer is None):
        return Problem(kind=status.UNAUTHORIZED, message=f"The API key cannot be read; {_HOW_TO_SEND}")
    if (identity := _identity_of(bare[0] if bearer is None else bearer["key"], known)) is None:
        whose = "for these routes" if is_admin(scope["path"]) else "one of this server's"
        return Problem(kind=status.UNAUTHORIZED, message=f"The API key is not {whose}")
    scope[TENANT], scope[OWNER] = identity
    return None


def _identity_of(given: bytes, known: _Digests) -> tuple[str, str] | None:
    """Return the tenant and the owner of a key; None if unknown. It takes the same time for any key."""
    digest = hashlib.sha256(given).digest()
    found = None
    for each, identity in known.items():
        if hmac.compare_digest(digest, each):
            found = identity
    return found


def _digests(keys: Iterable[str]) -> _Digests:
    return {hashlib.sha256(key.encode()).digest(): _identity(key.encode()) for key in keys}


def is_admin(path: str) -> bool:
    """Return True for a path below `ADMIN`, even without a route."""
    return path == ADMIN or path.startswith(f"{ADMIN}/")


def check_keys(keys: Iterable[str], setting: str = "api_key") -> None:
    """Check that clients can send all keys in a header.

    Args:
        keys: The keys.
        setting: Setting that has them, for errors.

    Raises:
        ConfigError: A key is too long or has other characters; the message never has the key.
    """
    for number, key in enumerate(keys, start=1):
        if len(key) > KEY_LIMIT or not _KEY.fullmatch(key):
            right = f"1 to {KEY_LIMIT} visible ASCII characters without spaces"
            raise ConfigError(f"{setting}=(number {number}): must be {right}")


def read_keys(path: Path) -> list[str]:
    """Read keys from a file, one per line; empty lines and lines that begin with # are skipped.

    Raises:
        ConfigError: The file cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in foreign_text.lines_of(path.read_bytes())]
    except (OSError, foreign_text.BadText) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"api_key_file={str(path)!r}: cannot be read ({reason})") from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:  # an empty file must not open the server to everyone
        raise ConfigError(f"api_key_file={str(path)!r}: has no key; expected one per line")
    return keys


def check_tenant_header(name: str) -> None:
    """Check that `name` is a valid name of a header.

    Raises:
        ConfigError: It is not.
    """
    if not _TOKEN.fullmatch(name):
        raise ConfigError(f"tenant_header={name!r}: must be the name of a header, such as X-Tenant")


def _identity(name: bytes) -> tuple[str, str]:
    """Return the tenant and the owner that a key or a name stands for."""
    return _tenant(name), hashlib.blake2b(name, digest_size=16, person=b"owner").hexdigest()


def _tenant(name: bytes) -> str:
    """Return the tenant's id in logs and queues: a hash too short to find the key or name by."""
    return hashlib.blake2b(name, digest_size=4, person=b"tenant").hexdigest()
