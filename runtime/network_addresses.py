"""Public network addresses, told from those that strangers must not reach through this server."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

_UNICAST: Final = IPv6Network("2000::/3")
"""The public part of IPv6 (IANA, "IPv6 Address Space").

It excludes loopback, fc00::/7, link-local and multicast. It also excludes addresses that carry one of IPv4, which
`is_global` lets pass: ::ffff:0:0/96 (mapped) and 64:ff9b::/96 (NAT64, RFC 6052).
"""

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
"""Special-purpose networks of the IANA registries that `is_global` lets pass in some version of Python."""


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return True if an address belongs to a single machine in the public internet."""
    if isinstance(address, IPv6Address) and address not in _UNICAST:
        return False
    return address.is_global and not any(address in network for network in _SPECIAL)


def literal(host: str) -> IPv4Address | IPv6Address | None:
    """Parse a host that is an address in its usual form; None for a name, and for forms like `127.1`.

    An address with a zone (`fe80::1%eth0`) is None, too: zones are names of interfaces.
    """
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return None if isinstance(address, IPv6Address) and address.scope_id is not None else address
