"""Allowed hosts of image URLs, from `EngineConfig.allow_media_domains`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Final

from staged_pool.runtime.network_addresses import is_public, literal
from staged_pool.stages.errors import ConfigError

_LABEL: Final = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME: Final = re.compile(rf"(?:{_LABEL}\.)*(?!\d+\Z|0x[0-9a-f]*\Z){_LABEL}")
"""A DNS name. Its last label is no number: resolvers take such a name for an address."""


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The parsed setting `EngineConfig.allow_media_domains`."""

    all_public: bool
    names: frozenset[str]
    addresses: frozenset[IPv4Address | IPv6Address]

    def __bool__(self) -> bool:
        """Return True if any host is allowed."""
        return self.all_public or bool(self.names or self.addresses)

    @staticmethod
    def of(entries: Iterable[str] | str) -> AllowedHosts:
        """Parse the setting.

        Raises:
            ConfigError: It is a single text, or an entry is neither a host name, nor an address, nor `*`.
        """
        if isinstance(entries, str):
            raise ConfigError(f"allow_media_domains={entries!r}: must be a tuple of hosts")
        names, addresses = set(), set()
        for entry in entries:
            name = str(entry).lower().removesuffix(".")
            if (address := literal(name)) is not None:
                addresses.add(address)
            elif name == "*" or _NAME.fullmatch(name):
                names.add(name)
            else:
                wanted = "a host name such as 'example.com', an address such as '10.0.0.5', or '*'"
                raise ConfigError(f"allow_media_domains={entry!r}: must be {wanted}")
        return AllowedHosts("*" in names, frozenset(names - {"*"}), frozenset(addresses))

    def allow(self, host: str) -> bool:
        """Return True if a URL may name this host. Addresses of a name are checked by `may_dial`.

        Args:
            host: Name or address in lower case.
        """
        if (address := literal(host)) is not None:
            return address in self.addresses or (self.all_public and is_public(address))
        labels = host.removesuffix(".").split(".")
        return self.all_public or any(".".join(labels[first:]) in self.names for first in range(len(labels)))

    def may_dial(self, address: str) -> bool:
        """Return True if connections to this address are allowed: it is public, or in the setting."""
        found = literal(address)
        return found is not None and (found in self.addresses or is_public(found))
