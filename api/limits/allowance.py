"""The account of what brings nothing: frames and streams of a client without an answer at their end.

A flood of HTTP/2 or HTTP/3 is one of many kinds (resets, pings, settings, windows, empty data, streams that make the
server reset them), and each is harmless in small numbers. So there is one account for all: a frame costs, an answer and
data pay back. A client that owes waits: its next frame is taken when time has paid. Its connections stay open for a
while, for a new one costs more than the frames of an old one.

The unit is about the work of answering a PING, 20 microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

import anyio

CLIENT_UNITS: Final = 10_000
"""Units that all connections of a client may cost ahead of their answers: those of eight hundred requests at once."""

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
        """What a client has spent of its allowance, and when that was. None for one that has spent nothing."""

    def of(self, address: tuple[str, int] | None) -> Allowance:
        """Return the account of the client with an address; None on a Unix socket."""
        return Allowance(self, client_of(address))

    def add(self, client: str, units: int) -> None:
        """Add to what a client has spent; less than nothing gives it back."""
        now = self._time()
        spent = self._still_spent(client, now) + units
        if spent <= 0:
            self._spent.pop(client, None)
            return
        if client not in self._spent and len(self._spent) >= CLIENTS:
            self._forget(now)
        self._spent[client] = (spent, now)

    def owed_s(self, client: str) -> float:
        """Return the seconds until a client has spent no more than it may."""
        return max(0.0, self._still_spent(client, self._time()) - CLIENT_UNITS) / CLIENT_UNITS_PER_S

    def _forget(self, now: float) -> None:
        """Make room: forget the half that has spent least by now."""
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
        """Seconds until the client has paid by waiting, and something more of it may be taken."""
        return self._allowances.owed_s(self._client)

    def spend(self, units: int) -> None:
        """Charge what has been taken."""
        self._allowances.add(self._client, units)

    def earn(self, units: int) -> None:
        """Pay back, for something that was of use."""
        self._allowances.add(self._client, -units)


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
