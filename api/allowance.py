"""The account of what brings nothing: frames and streams of a client without an answer at their end.

A flood of HTTP/2 or HTTP/3 is one of many kinds (resets, pings, settings, windows, empty data, streams that make the
server reset them), and each is harmless in small numbers. So there is one account for all: a frame costs, an answer and
data pay back, and a connection without credit ends. The unit is about the work of answering a PING, 20 microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

import anyio

CONNECTION_UNITS: Final = 2000
"""Units that a connection may cost ahead of its first answer: those of two hundred requests at once."""

CLIENT_UNITS: Final = 10_000
"""Units that all connections of a client may cost beyond that; and the most that a connection saves up."""

CLIENT_UNITS_PER_S: Final = 1000
"""Units that come back to a client in a second: 2 % of a core."""

ANSWER_UNITS: Final = 10
"""Units that an answer is worth beyond what its request cost: it makes good for one that was reset."""

CLIENTS: Final = 4096
"""Clients that are remembered; those that have spent least are forgotten first, who would be given as much anew."""

_IPV6_PREFIX: Final = 64
"""Whoever has one address of IPv6 has all of so long a prefix."""


class Allowances:
    """The accounts of all clients of one server.

    Args:
        time: The clock, in seconds.
    """

    def __init__(self, time: Callable[[], float] = anyio.current_time) -> None:
        self._time = time
        self._spent: dict[str, tuple[float, float]] = {}
        """What a client has spent of its allowance, and when that was."""

    def of(self, address: tuple[str, int] | None) -> Credit:
        """Open the account of a new connection; `address` is its client's, None on a Unix socket."""
        return Credit(self, client_of(address))

    def spend(self, client: str, units: int) -> bool:
        """Take units from a client's allowance; False: it has not so many."""
        now = self._time()
        spent = self._still_spent(self._spent.get(client), now)
        if spent + units > CLIENT_UNITS:
            return False
        if client not in self._spent and len(self._spent) >= CLIENTS:
            self._forget(now)
        self._spent[client] = (spent + units, now)
        return True

    def _forget(self, now: float) -> None:
        """Make room: forget the half that has spent least by now."""
        ranked = sorted(self._spent, key=lambda client: self._still_spent(self._spent[client], now))
        for client in ranked[: CLIENTS // 2]:
            del self._spent[client]

    @staticmethod
    def _still_spent(entry: tuple[float, float] | None, now: float) -> float:
        return 0.0 if entry is None else max(0.0, entry[0] - (now - entry[1]) * CLIENT_UNITS_PER_S)


class Credit:
    """The account of one connection."""

    def __init__(self, allowances: Allowances, client: str) -> None:
        self._allowances = allowances
        self._client = client
        self._units = CONNECTION_UNITS

    def spend(self, units: int) -> bool:
        """Pay for a frame; False: neither this connection nor its client has credit left."""
        self._units -= units
        if self._units >= 0:
            return True
        missing, self._units = -self._units, 0
        return self._allowances.spend(self._client, missing)

    def earn(self, units: int) -> None:
        """Pay back, for something that was of use."""
        self._units = min(self._units + units, CLIENT_UNITS)


def client_of(address: tuple[str, int] | None) -> str:
    """Return the network that one client has to itself; "" where its address is not known, as on a Unix socket."""
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
