"""Who may begin a connection of QUIC: a handshake costs milliseconds, and its first datagram may come from anybody.

Where many handshakes are unfinished, a client must first show that it receives what is sent to its address (Retry,
RFC 9000, section 8.1.2), which costs the server no memory. And no address has many of them unfinished.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import Counter
from dataclasses import dataclass
from typing import Final

from aioquic.quic.packet import QuicHeader, encode_quic_retry

from staged_pool.api.limits.allowance import client_of

RETRY_FROM: Final = 32
"""Unfinished handshakes from which on a client has to show its address."""

UNFINISHED: Final = 512
"""Unfinished handshakes at most: 2 MB."""

UNFINISHED_OF_CLIENT: Final = 64
"""Those of one address, or of one prefix of IPv6."""

TOKEN_S: Final = 30
"""How long a token may take to come back, which clients do at once (RFC 9000, section 8.1.4)."""

_ID_BYTES: Final = 8
_TIME_BYTES: Final = 4
_PROOF_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Admitted:
    """A connection that may begin."""

    original_id: bytes
    """The first name that the client gave to the server."""
    retry_id: bytes | None
    """The name that a Retry has given it since."""


class Handshakes:
    """Counts handshakes that have begun and not ended."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._of_client: Counter[str] = Counter()

    @property
    def unfinished(self) -> int:
        """Handshakes that have begun and not ended."""
        return self._of_client.total()

    def admit(self, header: QuicHeader, address: tuple[str, int], now: float) -> Admitted | bytes | None:
        """Decide about a first datagram: it begins a connection, is answered with a Retry, or is dropped."""
        if self.unfinished >= UNFINISHED or self._of_client[client_of(address)] >= UNFINISHED_OF_CLIENT:
            return None
        if (original := self._original_of(header, address, now)) is not None:
            return Admitted(original, header.destination_cid)
        if self.unfinished < RETRY_FROM:
            return Admitted(header.destination_cid, None)
        name = os.urandom(_ID_BYTES)
        claim = int(now).to_bytes(_TIME_BYTES, "big") + header.destination_cid
        token = claim + self._proof(claim, name, address)
        return bytes(
            encode_quic_retry(
                version=header.version or 0,  # an Initial packet has one
                source_cid=name,
                destination_cid=header.source_cid,
                original_destination_cid=header.destination_cid,
                retry_token=token,
            )
        )

    def _original_of(self, header: QuicHeader, address: tuple[str, int], now: float) -> bytes | None:
        """Return the name that a client gave to the server before its Retry; None: its token is none of this server."""
        claim, proof = header.token[:-_PROOF_BYTES], header.token[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(claim, header.destination_cid, address)):
            return None
        age_s = int(now) - int.from_bytes(claim[:_TIME_BYTES], "big")
        return claim[_TIME_BYTES:] if age_s <= TOKEN_S else None

    def _proof(self, claim: bytes, name: bytes, address: tuple[str, int]) -> bytes:
        """Sign what a token claims, for one address and the name that the Retry gives the server there."""
        signed = b"|".join((claim.hex().encode(), name.hex().encode(), repr(tuple(address[:2])).encode()))
        return hmac.digest(self._key, signed, hashlib.sha256)[:_PROOF_BYTES]

    def begin(self, address: tuple[str, int]) -> None:
        """Count a handshake."""
        self._of_client[client_of(address)] += 1

    def end(self, address: tuple[str, int]) -> None:
        """Count it no more: it is complete, or given up."""
        client = client_of(address)
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
