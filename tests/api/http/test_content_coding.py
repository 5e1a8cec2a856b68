from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest

from staged_pool.api.http.protocol.content_coding import (
    DEFLATE,
    GZIP,
    INLINE_BYTES,
    MAX_MEMBERS,
    SLICE_BYTES,
    coding_of,
    unpack,
)
from staged_pool.api.limits.server_state import ServerState
from staged_pool.api.status import HttpError

pytestmark = pytest.mark.anyio


def deflated(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


def members(body: bytes) -> bytes:
    third = len(body) // 3
    return gzip.compress(body[:third]) + gzip.compress(b"") + gzip.compress(body[third:])


PACKERS: dict[str, tuple[bytes, Callable[[bytes], bytes]]] = {
    "gzip": (GZIP, gzip.compress),
    "gzip of several members": (GZIP, members),
    "gzip that is stored": (GZIP, lambda body: gzip.compress(body, 0)),
    "deflate": (DEFLATE, zlib.compress),
    "deflate without a frame": (DEFLATE, deflated),
}


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("size", [0, 1, 1000, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1, 3 * SLICE_BYTES + 7])
@pytest.mark.parametrize("kind", ["noise", "zeros", "text"])
async def test_a_body_is_what_was_compressed_and_counted_as_it_comes(name: str, size: int, kind: str) -> None:
    text = b'{"input": ["A man is eating food.", "na\xc3\xafve"]}' * (size // 40 + 1)
    body = {"noise": random.Random(size).randbytes(size), "zeros": bytes(size), "text": text[:size]}[kind]
    coding, pack = PACKERS[name]
    slices: list[int] = []
    assert await unpack(pack(body), coding, slices.append, ServerState()) == body
    assert sum(slices) == size
    assert max(slices) <= SLICE_BYTES


@pytest.mark.parametrize(("coding", "pack"), [(GZIP, gzip.compress), (DEFLATE, zlib.compress), (DEFLATE, deflated)])
async def test_a_body_that_is_damaged_cut_short_or_followed_by_more_is_rejected(
    coding: bytes, pack: Callable[[bytes], bytes]
) -> None:
    packed = pack(b"A man is eating food." * 10_000)
    for wrong in (packed[:-1], packed[: len(packed) // 2], packed + b"x", b"{}", packed[:1], packed[9:]):
        with pytest.raises(HttpError) as rejected:
            await unpack(wrong, coding, lambda count: None, ServerState())
        assert rejected.value.problem.status == 400
        assert coding.decode() in rejected.value.problem.message


async def test_a_body_of_more_members_than_have_a_reason_is_rejected() -> None:
    assert (
        await unpack(gzip.compress(b"a") * MAX_MEMBERS, GZIP, lambda count: None, ServerState()) == b"a" * MAX_MEMBERS
    )
    with pytest.raises(HttpError, match="Content-Encoding"):
        await unpack(gzip.compress(b"") * (MAX_MEMBERS + 1), GZIP, lambda count: None, ServerState())


@pytest.mark.parametrize(
    ("given", "coding"),
    [
        ([], None),
        (["identity"], None),
        (["", "identity, "], None),
        (["gzip"], GZIP),
        (["GZip"], GZIP),
        (["x-gzip"], GZIP),
        (["identity, gzip"], GZIP),
        (["identity", "deflate"], DEFLATE),
    ],
)
async def test_codings_are_known_by_their_names(given: list[str], coding: bytes | None) -> None:
    assert coding_of([(b"content-encoding", value.encode()) for value in given]) == coding


@pytest.mark.parametrize("given", [["br"], ["zstd"], ["gzip", "gzip"], ["gzip, deflate"], ["gzip;q=1"]])
async def test_a_coding_that_is_not_undone_is_rejected_with_those_that_are(given: list[str]) -> None:
    with pytest.raises(HttpError) as rejected:
        coding_of([(b"content-encoding", value.encode()) for value in given])
    problem = rejected.value.problem
    assert problem.status == 415
    assert "gzip and deflate" in problem.message
    assert ", ".join(given) in problem.message
    assert problem.headers() == [(b"accept-encoding", b"gzip, deflate")]
