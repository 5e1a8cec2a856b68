"""The beginning of QUIC connections, and the worth of a Retry's token."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

pytest.importorskip("aioquic")

from aioquic._buffer import Buffer
from aioquic.quic.packet import QuicPacketType, pull_quic_header

from staged_pool.api.http.http3.handshakes import (
    RETRY_FROM,
    TOKEN_S,
    UNFINISHED,
    UNFINISHED_OF_CLIENT,
    Admitted,
    Handshakes,
)

CLIENT = ("10.0.0.1", 4433)


@dataclass
class First:
    """Fields of a first datagram."""

    destination_cid: bytes = b"12345678"
    source_cid: bytes = b"abcdefgh"
    token: bytes = b""
    version: int = 1


def _busy(count: int = RETRY_FROM) -> Handshakes:
    handshakes = Handshakes()
    for number in range(count):
        handshakes.begin((f"10.1.{number >> 8}.{number & 255}", 1))
    return handshakes


def _retried(handshakes: Handshakes) -> First:
    """The first datagram again, after a Retry."""
    retry = handshakes.admit(First(), CLIENT, 100.0)  # type: ignore[arg-type]
    assert isinstance(retry, bytes)
    header = pull_quic_header(Buffer(data=retry), host_cid_length=8)
    assert (header.packet_type, header.destination_cid) == (QuicPacketType.RETRY, First().source_cid)
    return First(destination_cid=header.source_cid, token=header.token)


def test_a_few_handshakes_begin_at_once() -> None:
    assert _busy(RETRY_FROM - 1).admit(First(), CLIENT, 0.0) == Admitted(b"12345678", None)  # type: ignore[arg-type]


def test_beside_many_a_client_shows_its_address_first() -> None:
    handshakes = _busy()
    again = _retried(handshakes)
    assert handshakes.admit(again, CLIENT, 101.0) == Admitted(b"12345678", again.destination_cid)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "now", "name", "changed"),
    [
        (("10.0.0.2", 4433), 101.0, None, False),
        (("10.0.0.1", 4434), 101.0, None, False),
        (CLIENT, 102.0 + TOKEN_S, None, False),
        (CLIENT, 101.0, b"another!", False),
        (CLIENT, 101.0, None, True),
    ],
    ids=["another address", "another port", "too late", "another name", "a changed token"],
)
def test_a_token_is_worth_nothing_elsewhere(
    address: tuple[str, int], now: float, name: bytes | None, *, changed: bool
) -> None:
    handshakes = _busy()
    again = _retried(handshakes)
    if name is not None:
        again.destination_cid = name
    if changed:
        again.token = again.token[:5] + bytes([again.token[5] ^ 1]) + again.token[6:]
    assert isinstance(handshakes.admit(again, address, now), bytes)  # type: ignore[arg-type]


def test_a_token_of_another_server_is_worth_nothing() -> None:
    assert isinstance(_busy().admit(_retried(_busy()), CLIENT, 101.0), bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [b"", b"x", bytes(15), bytes(16), bytes(1000)])
def test_any_bytes_may_come_as_a_token(token: bytes) -> None:
    assert isinstance(_busy().admit(First(token=token), CLIENT, 0.0), bytes)  # type: ignore[arg-type]


def test_an_address_has_no_more_than_its_part() -> None:
    handshakes = Handshakes()
    for _ in range(UNFINISHED_OF_CLIENT):
        handshakes.begin(CLIENT)
    again = First(token=b"")
    assert handshakes.admit(again, ("10.0.0.1", 9), 0.0) is None  # type: ignore[arg-type]
    assert handshakes.admit(again, ("10.0.0.2", 9), 0.0) is not None  # type: ignore[arg-type]
    handshakes.end(CLIENT)
    assert handshakes.admit(again, ("10.0.0.1", 9), 0.0) is not None  # type: ignore[arg-type]


def test_beyond_the_limit_nothing_begins_and_all_is_forgotten_at_the_end() -> None:
    handshakes = _busy(UNFINISHED)
    assert handshakes.admit(First(), CLIENT, 0.0) is None  # type: ignore[arg-type]
    for number in range(UNFINISHED):
        handshakes.end((f"10.1.{number >> 8}.{number & 255}", 1))
    assert (handshakes.unfinished, len(handshakes._of_client)) == (0, 0)
