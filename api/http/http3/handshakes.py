"""Admission of QUIC handshakes, which cost milliseconds each and may come from forged addresses.

While many handshakes are unfinished, a client must first prove its address (Retry, RFC 9000, section 8.1.2), which
costs the server no memory. And each client may have only a few unfinished ones.
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
"""Number of unfinished handshakes from which on a client must prove its address."""

UNFINISHED: Final = 512
"""Maximum number of unfinished handshakes: about 2 MB of memory."""

UNFINISHED_OF_CLIENT: Final = 64
"""Maximum number of unfinished handshakes of one address, or of one IPv6 prefix."""

TOKEN_S: Final = 30
"""Seconds for which a token is valid; clients send it back at once (RFC 9000, section 8.1.4)."""

_ID_BYTES: Final = 8
_TIME_BYTES: Final = 4
_PROOF_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Admitted:
    """A handshake that may begin."""

    original_id: bytes
    """The first connection id that the client chose for the server."""
    retry_id: bytes | None
    """The connection id from a Retry; None without one."""


class Handshakes:
    """Counts unfinished handshakes, in total and by client."""

    def __init__(self) -> None:
        self._key = os.urandom(32)
        self._of_client: Counter[str] = Counter()

    @property
    def unfinished(self) -> int:
        """Number of unfinished handshakes."""
        return self._of_client.total()

    def admit(self, header: QuicHeader, address: tuple[str, int], now: float) -> Admitted | bytes | None:
        """Decide about a client's first datagram: admit it, return a Retry as bytes, or drop it (None)."""
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
        """Return the connection id from before a Retry; None if the token is not valid.

        A valid token was made by this server, for this address, within the last `TOKEN_S` seconds.
        """
        claim, proof = header.token[:-_PROOF_BYTES], header.token[-_PROOF_BYTES:]
        if not hmac.compare_digest(proof, self._proof(claim, header.destination_cid, address)):
            return None
        age_s = int(now) - int.from_bytes(claim[:_TIME_BYTES], "big")
        return claim[_TIME_BYTES:] if age_s <= TOKEN_S else None

    def _proof(self, claim: bytes, name: bytes, address: tuple[str, int]) -> bytes:
        """Sign a token's content, together with the client's address and the Retry's connection id."""
        signed = b"|".join((claim.hex().encode(), name.hex().encode(), repr(tuple(address[:2])).encode()))
        return hmac.digest(self._key, signed, hashlib.sha256)[:_PROOF_BYTES]

    def begin(self, address: tuple[str, int]) -> None:
        """Count a new handshake."""
        self._of_client[client_of(address)] += 1

    def end(self, address: tuple[str, int]) -> None:
        """Stop counting a handshake, which is complete or given up."""
        client = client_of(address)
        self._of_client[client] -= 1
        if not self._of_client[client]:
            del self._of_client[client]
