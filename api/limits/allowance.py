"""Allowance of each client for HTTP/2 and HTTP/3 frames that lead to no response.

There are many kinds of floods: resets, pings, settings, window updates, empty data, malformed streams. In small numbers
each of these frames is harmless, so one account per client covers all of them. A frame spends units; a response and
body data earn them back. A client that has overspent is paused: its next frame is processed once enough units have
come back with time. Its connections stay open meanwhile, because a new connection costs more than frames on an old one.

One unit is about the work of answering a PING.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

import anyio

CLIENT_UNITS: Final = 10_000
"""Units that all connections of a client may spend ahead of their responses: enough for 800 requests at once."""

CLIENT_UNITS_PER_S: Final = 1000
"""Units per second that a client regains: about 2 % of a core."""

ANSWER_UNITS: Final = 10
"""Units that a response earns beyond the cost of its request: they cover one request that was reset."""

CLIENTS: Final = 4096
"""Clients with an account. Beyond it, those that have spent least are forgotten: a new account gives them little."""

_IPV6_PREFIX: Final = 64
"""Bits of the IPv6 prefix that counts as one client: a client usually controls all addresses of its /64."""


class Allowances:
    """The accounts of all clients of one server.

    Args:
        time: The clock, in seconds.
    """

    def __init__(self, time: Callable[[], float] = anyio.current_time) -> None:
        self._time = time
        self._spent: dict[str, tuple[float, float]] = {}
        """Per client: the units spent, and the time of that count in seconds. Clients without spending have none."""

    def of(self, address: tuple[str, int] | None) -> Allowance:
        """Return the account of the client at this address; None stands for a Unix socket."""
        return Allowance(self, client_of(address))

    def add(self, client: str, units: int) -> None:
        """Add to the spent units of a client; a negative number gives units back."""
        now = self._time()
        spent = self._still_spent(client, now) + units
        if spent <= 0:
            self._spent.pop(client, None)
            return
        if client not in self._spent and len(self._spent) >= CLIENTS:
            self._forget(now)
        self._spent[client] = (spent, now)

    def owed_s(self, client: str) -> float:
        """Return the seconds until a client is within its allowance again."""
        return max(0.0, self._still_spent(client, self._time()) - CLIENT_UNITS) / CLIENT_UNITS_PER_S

    def _forget(self, now: float) -> None:
        """Make room: forget the half of the clients that has spent least."""
        ranked = sorted(self._spent, key=lambda client: self._still_spent(client, now))
        for client in ranked[: CLIENTS // 2]:
            del self._spent[client]

    def _still_spent(self, client: str, now: float) -> float:
        spent, at = self._spent.get(client, (0.0, now))
        return max(0.0, spent - (now - at) * CLIENT_UNITS_PER_S)


class Allowance:
    """The account of one client."""

    def __init__(self, allowances: Allowances, client: str) -> None:
        self._allowances = allowances
        self._client = client

    @property
    def owed_s(self) -> float:
        """Seconds until the client is within its allowance, and its next frame may be processed."""
        return self._allowances.owed_s(self._client)

    def spend(self, units: int) -> None:
        """Charge for frames that were processed."""
        self._allowances.add(self._client, units)

    def earn(self, units: int) -> None:
        """Give units back, for a response or for body data."""
        self._allowances.add(self._client, -units)


def client_of(address: tuple[str, int] | None) -> str:
    """Return the network that counts as one client; "" for an unknown address, as on a Unix socket."""
    return "" if address is None else _network(address[0])


@lru_cache(1024)
def _network(address: str) -> str:
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if (mapped := parsed.ipv4_mapped) is not None:
        return str(mapped)
    return str(int(parsed) >> (128 - _IPV6_PREFIX))
