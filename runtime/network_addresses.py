"""Which network addresses a stranger may have this server ask."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_UNICAST: Final = IPv6Network("2000::/3")
"""All that is assigned of IPv6 for the public (IANA, "IPv6 Address Space"). It leaves out loopback, fc00::/7,
link-local and multicast, and what carries an address of IPv4: ::ffff:0:0/96 (mapped) and 64:ff9b::/96 (NAT64, RFC
6052), which `is_global` lets pass."""

_SPECIAL: Final = (
    IPv4Network("100.64.0.0/10"),  # shared by the customers of a provider, RFC 6598
    IPv4Network("192.0.0.0/24"),  # of protocols, RFC 6890
    IPv4Network("192.88.99.0/24"),  # relays to IPv6, RFC 7526
    IPv4Network("224.0.0.0/4"),  # multicast
    IPv4Network("240.0.0.0/4"),  # reserved, and the broadcast address
    IPv6Network("2001::/23"),  # of protocols, RFC 2928; among them Teredo, which carries an address of IPv4
    IPv6Network("2001:db8::/32"),  # of examples, RFC 3849
    IPv6Network("2002::/16"),  # 6to4, RFC 3056: carries an address of IPv4
    IPv6Network("3fff::/20"),  # of examples, RFC 9637
)
"""Of the IANA registries of special-purpose addresses: what `is_global` has let pass in one version of Python or
another, or does not speak of."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is that of one machine in the public internet, as far as that can be said of it alone."""
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return False
    return address.is_global and not any(address in network for network in _SPECIAL)


def literal(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is, in the one spelling of its own; None for a name, and for `127.1` and its like.

    Without zones (`fe80::1%eth0`): they are names of interfaces.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return None if isinstance(address, IPv6Address) and address.scope_id is not None else address
