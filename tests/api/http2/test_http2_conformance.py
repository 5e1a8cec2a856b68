"""Sections of RFC 9113 and RFC 7541, frame by frame on a real server.

The cases follow those of h2spec, a known suite in Go that PyPI, npm and Debian do not have. The standard lets a server
end the connection for most errors of a stream; here the other streams must go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from h2.errors import ErrorCodes as Code

from staged_pool.api.http.http2.frames import FRAME_BYTES
from tests.servers.http2_client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    REQUEST,
    RST_STREAM,
    SETTINGS,
    UPLOAD,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    RawHttp2,
    block,
    frame,
    head,
    number,
    raw_http2,
    setting,
)
from tests.servers.on_socket import serving

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Case:
    name: str
    sent: bytes
    stream: Code | None = None
    """The stream 1 alone is reset, with this code."""
    connection: tuple[Code, ...] = ()
    """The connection ends, with one of these codes."""

    @property
    def is_fine(self) -> bool:
        """Nothing is wrong: stream 1, if there is one, is answered, and the connection goes on."""
        return self.stream is None and not self.connection


OPEN = head(1, *UPLOAD, flags=END_HEADERS)
"""A request whose body is still to come: it stays open until the test is over."""

BODY = b'{"input":"a"}'


def request(**changed: bytes | None) -> bytes:
    """A request of which some pseudo-headers are others, or left out."""
    fields = {name.decode()[1:]: value for name, value in REQUEST} | changed
    return head(1, *((b":" + name.encode(), value) for name, value in fields.items() if value is not None))


def with_header(name: bytes, value: bytes = b"a") -> bytes:
    return head(1, *REQUEST, (name, value))


def upload(length: bytes, *bodies: bytes) -> bytes:
    """An upload that announces a length and sends these bodies."""
    sent = head(1, *UPLOAD, (b"content-length", length), flags=END_HEADERS | (0 if bodies else END_STREAM))
    for index, body in enumerate(bodies):
        sent += frame(DATA, body, END_STREAM if index == len(bodies) - 1 else 0, 1)
    return sent


FINE = [
    Case("4.1 a frame of an unknown type is ignored", frame(0x16, b"12345678") + head(1)),
    Case("4.1 undefined flags are ignored", frame(PING, b"12345678", 0xF6) + head(1)),
    Case("4.1 the reserved bit is ignored", frame(PING, b"12345678", 0, 2**31) + head(1)),
    Case("5.1 a PRIORITY frame for an idle stream is taken", frame(PRIORITY, number(0) + b"\x10", 0, 3) + head(1)),
    Case("5.1 closed: PRIORITY is taken", head(1) + frame(PRIORITY, number(0) + b"\x10", 0, 1)),
    Case("5.1 closed: WINDOW_UPDATE is taken", head(1) + frame(WINDOW_UPDATE, number(1), 0, 1)),
    Case("6.1 padded data", OPEN + frame(DATA, b"\x03" + BODY + bytes(3), PADDED | END_STREAM, 1)),
    Case("6.2 a padded head", frame(HEADERS, b"\x03" + block(*REQUEST) + bytes(3), 1 | 4 | PADDED, 1)),
    Case("6.2 a head with a priority", frame(HEADERS, number(0) + b"\x10" + block(*REQUEST), 5 | WITH_PRIORITY, 1)),
    Case(
        "6.2 a head in a frame and two CONTINUATION frames",
        frame(HEADERS, block(*REQUEST[:2]), END_STREAM, 1)
        + frame(CONTINUATION, block(REQUEST[2]), 0, 1)
        + frame(CONTINUATION, block(REQUEST[3]), END_HEADERS, 1),
    ),
    Case("6.5.2 an unknown setting is ignored", setting(0xFF, 1) + head(1)),
    Case("6.5.2 a setting sent twice", setting(4, 100) + setting(4, 2**16) + head(1)),
    Case("6.5.3 an empty SETTINGS frame", frame(SETTINGS) + head(1)),
    Case("6.7 a PING that is an answer is not answered", frame(PING, b"12345678", ACK) + head(1)),
    Case("8.1 trailers", OPEN + frame(DATA, BODY, 0, 1) + head(1, (b"x-sum", b"1"))),
    Case("8.2.2 te: trailers", with_header(b"te", b"trailers")),
    Case("8.2.3 cookies in two headers", head(1, *REQUEST, (b"cookie", b"a=b"), (b"cookie", b"c=d"))),
    Case("8.3.1 host in place of :authority", head(1, *REQUEST[:2], REQUEST[3], (b"host", b"a"))),
    Case("8.3.1 host beside the same :authority", with_header(b"host", b"a")),
    Case("8.1.1 a body as long as it says, in two frames", upload(b"13", BODY[:5], BODY[5:])),
    Case("7541 2.3.3 an index of the static table", frame(HEADERS, b"\x82\x86\x41\x01a\x04\x07/health", 5, 1)),
    Case("7541 6.3 a smaller table", frame(HEADERS, b"\x3f\xe1\x0f" + block(*REQUEST), 5, 1)),
]

STREAM = [
    Case("5.1 half-closed: another head", head(1, *UPLOAD) + head(1, *UPLOAD), stream=Code.STREAM_CLOSED),
    Case(
        "5.3.1 a stream that depends on itself",
        frame(HEADERS, number(1) + b"\x10" + block(*UPLOAD), 4 | 32, 1),
        stream=Code.PROTOCOL_ERROR,
    ),
    Case(
        "6.9.1 a window of a stream beyond 2^31-1",
        OPEN + frame(WINDOW_UPDATE, number(2**31 - 1), 0, 1),
        stream=Code.FLOW_CONTROL_ERROR,
    ),
    Case(
        "8.1 trailers that end nothing", OPEN + head(1, (b"x-sum", b"1"), flags=END_HEADERS), stream=Code.PROTOCOL_ERROR
    ),
    Case("8.1 trailers with a pseudo-header", OPEN + head(1, (b":path", b"/")), stream=Code.PROTOCOL_ERROR),
    *(
        Case(f"8.1.1 {what}", sent, stream=Code.PROTOCOL_ERROR)
        for what, sent in {
            "a content-length and no body": upload(b"13"),
            "a body that is too short": upload(b"14", BODY),
            "a body that is too long": upload(b"12", BODY),
            "a body that is too long by its second frame": upload(b"13", BODY, b"x"),
            "a content-length that is no number": upload(b"1x", BODY),
            "two content-lengths": head(1, *UPLOAD, (b"content-length", b"1"), (b"content-length", b"2")),
        }.items()
    ),
    *(
        Case(f"8.2 {what}", sent, stream=Code.PROTOCOL_ERROR)
        for what, sent in {
            "a capital in a name": with_header(b"X-Test"),
            "a name that is empty": with_header(b""),
            "a name with a space": with_header(b"x test"),
            "a name with a colon": with_header(b"x:test"),
            "a name that is not ASCII": with_header(b"x-\xc3\xbc"),
            "a line break in a value": with_header(b"x-test", b"a\r\nb: c"),
            "a zero in a value": with_header(b"x-test", b"a\0"),
            "space before a value": with_header(b"x-test", b" a"),
            "space behind a value": with_header(b"x-test", b"a\t"),
            "connection": with_header(b"connection", b"keep-alive"),
            "keep-alive": with_header(b"keep-alive"),
            "proxy-connection": with_header(b"proxy-connection"),
            "transfer-encoding": with_header(b"transfer-encoding", b"chunked"),
            "upgrade": with_header(b"upgrade"),
            "te with anything else": with_header(b"te", b"trailers, deflate"),
        }.items()
    ),
    *(
        Case(f"8.3 {what}", sent, stream=Code.PROTOCOL_ERROR)
        for what, sent in {
            "a pseudo-header that nobody knows": head(1, *REQUEST, (b":test", b"a")),
            "a pseudo-header of answers": head(1, *REQUEST, (b":status", b"200")),
            "a pseudo-header behind others": head(1, *REQUEST[:3], (b"x", b"a"), REQUEST[3]),
            "no method": request(method=None),
            "no scheme": request(scheme=None),
            "no path": request(path=None),
            "an empty path": request(path=b""),
            "a path without a slash": request(path=b"health"),
            "a path that is not ASCII": request(path="/ü".encode()),
            "a path with a space": request(path=b"/a b"),
            "no authority": request(authority=None),
            "an authority with a user": request(authority=b"user@a"),
            "an authority with a path": request(authority=b"a/b"),
            "an empty authority": request(authority=b""),
            "another host beside the authority": with_header(b"host", b"b"),
            "two hosts": head(1, *REQUEST[:2], REQUEST[3], (b"host", b"a"), (b"host", b"a")),
            "a method that is no token": request(method=b"GE T"),
            "CONNECT": request(method=b"CONNECT", path=None, scheme=None),
            "CONNECT with a protocol": head(1, (b":method", b"CONNECT"), *REQUEST[1:], (b":protocol", b"websocket")),
            "* for a method that is not OPTIONS": request(path=b"*"),
            **{f"two of {name.decode()}": head(1, *REQUEST, (name, value)) for name, value in REQUEST},
        }.items()
    ),
]

P, SIZE, FLOW, COMPRESSION, CLOSED, CALM = (
    Code.PROTOCOL_ERROR,
    Code.FRAME_SIZE_ERROR,
    Code.FLOW_CONTROL_ERROR,
    Code.COMPRESSION_ERROR,
    Code.STREAM_CLOSED,
    Code.ENHANCE_YOUR_CALM,
)

CONNECTION = [
    Case(
        "4.2 DATA longer than SETTINGS_MAX_FRAME_SIZE",
        OPEN + frame(DATA, bytes(FRAME_BYTES + 1), 0, 1),
        connection=(SIZE,),
    ),
    Case(
        "4.2 HEADERS longer than SETTINGS_MAX_FRAME_SIZE",
        frame(HEADERS, bytes(FRAME_BYTES + 1), 5, 1),
        connection=(SIZE,),
    ),
    Case("4.2 a frame of 16 MiB of which nothing has come", b"\xff\xff\xff\0\0" + number(1), connection=(SIZE,)),
    Case(
        "4.3 a block that cannot be decompressed",
        frame(HEADERS, b"\xff\xff\xff\xff\xff\xff", 5, 1),
        connection=(COMPRESSION,),
    ),
    Case(
        "4.3 PRIORITY within a block",
        frame(HEADERS, block(*REQUEST), 1, 1) + frame(PRIORITY, number(0) + b"\x10", 0, 1),
        connection=(P,),
    ),
    Case("4.3 another head within a block", frame(HEADERS, block(*REQUEST), 1, 1) + head(3), connection=(P,)),
    Case(
        "4.3 an unknown frame within a block",
        frame(HEADERS, block(*REQUEST), 1, 1) + frame(0x16, b"", 0, 1),
        connection=(P,),
    ),
    Case("5.1 idle: DATA", frame(DATA, b"x", 1, 1), connection=(P, CLOSED)),
    Case("5.1 idle: RST_STREAM", frame(RST_STREAM, number(8), 0, 1), connection=(P,)),
    Case("5.1 idle: WINDOW_UPDATE", frame(WINDOW_UPDATE, number(1), 0, 1), connection=(P,)),
    Case("5.1 idle: CONTINUATION", frame(CONTINUATION, block(*REQUEST), 4, 1), connection=(P,)),
    Case("5.1.1 an even number", head(2), connection=(P,)),
    Case("5.1.1 a number lower than one before", head(5) + head(3), connection=(P,)),
    Case("6.1 DATA on stream 0", frame(DATA, b"x", 1, 0), connection=(P,)),
    Case("6.1 more padding than there is", OPEN + frame(DATA, b"\x0a" + b"x" * 9, PADDED | 1, 1), connection=(P,)),
    Case("6.2 HEADERS on stream 0", frame(HEADERS, block(*REQUEST), 5, 0), connection=(P,)),
    Case("6.2 more padding than there is", frame(HEADERS, b"\xff" + block(*REQUEST), 5 | PADDED, 1), connection=(P,)),
    Case("6.3 PRIORITY on stream 0", frame(PRIORITY, number(1) + b"\x10", 0, 0), connection=(P,)),
    Case("6.3 PRIORITY of 4 bytes", OPEN + frame(PRIORITY, number(0), 0, 1), connection=(SIZE,)),
    Case("6.4 RST_STREAM on stream 0", frame(RST_STREAM, number(8), 0, 0), connection=(P,)),
    Case("6.4 RST_STREAM of 3 bytes", OPEN + frame(RST_STREAM, b"\0\0\0", 0, 1), connection=(SIZE,)),
    Case("6.5 SETTINGS with an ACK and a payload", frame(SETTINGS, bytes(6), ACK, 0), connection=(SIZE,)),
    Case("6.5 SETTINGS on a stream", frame(SETTINGS, b"", 0, 1), connection=(P,)),
    Case("6.5 SETTINGS of 5 bytes", frame(SETTINGS, bytes(5), 0, 0), connection=(SIZE,)),
    Case("6.5.2 SETTINGS_ENABLE_PUSH of 2", setting(2, 2), connection=(P,)),
    Case("6.5.2 SETTINGS_INITIAL_WINDOW_SIZE of 2^31", setting(4, 2**31), connection=(FLOW,)),
    Case("6.5.2 SETTINGS_MAX_FRAME_SIZE of 2^14-1", setting(5, 2**14 - 1), connection=(P,)),
    Case("6.5.2 SETTINGS_MAX_FRAME_SIZE of 2^24", setting(5, 2**24), connection=(P,)),
    Case("6.6 a client that pushes", OPEN + frame(PUSH_PROMISE, number(2) + block(*REQUEST), 4, 1), connection=(P,)),
    Case("6.7 PING on a stream", frame(PING, b"12345678", 0, 1), connection=(P,)),
    Case("6.7 PING of 6 bytes", frame(PING, b"123456", 0, 0), connection=(SIZE,)),
    Case("6.8 GOAWAY on a stream", frame(GOAWAY, bytes(8), 0, 1), connection=(P,)),
    Case("6.9 WINDOW_UPDATE of 3 bytes", frame(WINDOW_UPDATE, b"\0\0\1", 0, 0), connection=(SIZE,)),
    Case("6.9 WINDOW_UPDATE of 0", frame(WINDOW_UPDATE, number(0), 0, 0), connection=(P,)),
    Case(
        "6.9.1 the window of the connection beyond 2^31-1",
        frame(WINDOW_UPDATE, number(2**31 - 1), 0, 0),
        connection=(FLOW,),
    ),
    Case(
        "6.9.2 SETTINGS that take a window beyond 2^31-1",
        OPEN + frame(WINDOW_UPDATE, number(2**30), 0, 1) + setting(4, 2**31 - 1),
        connection=(FLOW,),
    ),
    Case(
        "6.10 CONTINUATION on stream 0",
        frame(HEADERS, block(*REQUEST), 1, 1) + frame(CONTINUATION, b"", 4, 0),
        connection=(P,),
    ),
    Case(
        "6.10 CONTINUATION behind a block that is complete",
        OPEN + frame(CONTINUATION, b"", 4, 1),
        connection=(P, CLOSED),
    ),
    Case(
        "6.10 a block of headers without an end",
        frame(HEADERS, b"", 1, 1) + frame(CONTINUATION, bytes(FRAME_BYTES), 0, 1) * 5,
        connection=(CALM,),
    ),
    Case(
        "10.5.1 a list of headers that is too long",
        frame(HEADERS, b"\x40\x01x\x7f\x80\x1e" + b"y" * 3967 + b"\xbe" * 9000, 5, 1),
        connection=(CALM,),
    ),
    Case(
        "7541 2.3.3 an index beyond both tables",
        frame(HEADERS, b"\xc6" + block(*REQUEST), 5, 1),
        connection=(COMPRESSION,),
    ),
    Case(
        "7541 4.2 a table size behind a header",
        frame(HEADERS, block(*REQUEST) + b"\x20", 5, 1),
        connection=(COMPRESSION,),
    ),
    Case(
        "7541 5.2 a Huffman string with too long a padding",
        frame(HEADERS, block(*REQUEST) + b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff", 5, 1),
        connection=(COMPRESSION,),
    ),
    Case(
        "7541 5.2 a Huffman string with a padding of zeros",
        frame(HEADERS, block(*REQUEST) + b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90", 5, 1),
        connection=(COMPRESSION,),
    ),
    Case(
        "7541 5.2 a Huffman string that contains its end",
        frame(HEADERS, block(*REQUEST) + b"\x00\x85\xf2\xb2\x4a\x87\xff\xff\xff\xff\x84\x49\x50", 5, 1),
        connection=(COMPRESSION,),
    ),
    Case("7541 6.1 index 0", frame(HEADERS, b"\x80" + block(*REQUEST), 5, 1), connection=(COMPRESSION,)),
    Case(
        "7541 6.3 a table larger than is allowed",
        frame(HEADERS, b"\x3f\xe2\x1f" + block(*REQUEST), 5, 1),
        connection=(COMPRESSION,),
    ),
]


@pytest.mark.parametrize("case", FINE, ids=lambda case: case.name)
async def test_what_is_allowed_is_answered(case: Case) -> None:
    async with serving() as served, raw_http2(served) as client:
        await client.send(case.sent)
        seen = await client.until_settled(1)
        assert (seen.statuses.get(1), seen.resets, seen.goaway) == (b"200", {}, None)
        await _assert_goes_on(client)


@pytest.mark.parametrize("case", STREAM, ids=lambda case: case.name)
async def test_a_malformed_stream_ends_alone(case: Case) -> None:
    async with serving() as served, raw_http2(served) as client:
        await client.send(case.sent)
        seen = await client.until_settled(1)
        assert (seen.resets, seen.goaway) == ({1: case.stream}, None)
        await _assert_goes_on(client)
        assert served.in_flight == 0


@pytest.mark.parametrize("case", CONNECTION, ids=lambda case: case.name)
async def test_an_error_of_the_connection_ends_it_with_a_reason(case: Case) -> None:
    async with serving() as served, raw_http2(served) as client:
        await client.send(case.sent)
        seen = await client.until_closed()
        assert seen.goaway in case.connection
        await served.assert_alive()


async def _assert_goes_on(client: RawHttp2) -> None:
    await client.send(head(101))
    seen = await client.until_settled(101)
    assert (seen.statuses.get(101), seen.goaway) == (b"200", None)


# Cases of more than one step


async def test_section_3_4_an_invalid_preface_ends_the_connection() -> None:
    async with serving() as served, await served.connect() as stream:
        client = RawHttp2(stream)
        await client.send(PREFACE[:-2] + b"xx" + frame(SETTINGS))
        await client.until_closed()
        await served.assert_alive()


async def test_section_3_4_settings_come_first_and_are_acknowledged() -> None:
    async with serving() as served, raw_http2(served) as client:
        seen = await client.until_answered_ping()
        assert seen.frames[0].type == SETTINGS
        assert not seen.frames[0].flags
        assert any(answer.type == SETTINGS and "ACK" in answer.flags for answer in seen.frames[1:])


async def test_section_5_1_2_streams_beyond_what_was_agreed_are_refused_alone() -> None:
    async with serving() as served, raw_http2(served) as client:
        last = 2 * 100 + 1
        await client.send(*(head(stream, *UPLOAD, flags=END_HEADERS) for stream in range(1, last + 1, 2)))
        seen = await client.until_answered_ping()
        assert seen.resets == {last: Code.REFUSED_STREAM}
        await client.send(frame(DATA, BODY, END_STREAM, 1))
        await client.until_settled(1)
        assert seen.statuses[1] == b"200"
        await client.send(head(last + 2))
        await client.until_settled(last + 2)
        assert seen.statuses[last + 2] == b"200"


async def test_section_6_7_a_ping_comes_back_with_its_bytes() -> None:
    async with serving() as served, raw_http2(served) as client:
        seen = await client.until_answered_ping()
        (answer,) = [answer for answer in seen.frames if answer.type == PING]
        assert (answer.opaque_data, answer.flags) == (b"all seen", {"ACK"})


async def test_section_6_9_a_window_of_one_byte_lets_one_byte_through() -> None:
    async with serving() as served, raw_http2(served, setting(4, 1)) as client:
        await client.send(head(1))
        await client.until(lambda: 1 in client.seen.bodies)
        await client.until_answered_ping()
        assert len(client.seen.bodies[1]) == 1
        await client.send(frame(WINDOW_UPDATE, number(2**16), 0, 1))
        await client.until_settled(1)
        assert client.seen.bodies[1].startswith(b'{"unix"')


async def test_section_6_9_2_settings_may_take_a_window_below_zero() -> None:
    async with serving() as served, raw_http2(served, setting(4, 3)) as client:
        await client.send(head(1))
        await client.until(lambda: len(client.seen.bodies.get(1, b"")) == 3)
        await client.send(setting(4, 2), frame(WINDOW_UPDATE, number(2), 0, 1))
        await client.until(lambda: len(client.seen.bodies[1]) > 3)
        await client.until_answered_ping()
        assert len(client.seen.bodies[1]) == 4
        await client.send(setting(4, 2**16))
        await client.until_settled(1)
        assert client.seen.ended == {1}


async def test_section_8_1_an_upload_behind_its_answer_is_told_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.http.general_path.LINGER_S", 0.01)
    async with serving(body_limit_bytes=50) as served, raw_http2(served) as client:
        await client.send(OPEN + frame(DATA, b"x" * 51, 0, 1))
        await client.until(lambda: 1 in client.seen.resets)
        assert (client.seen.statuses[1], client.seen.ended, client.seen.resets) == (b"413", {1}, {1: Code.NO_ERROR})
        await client.send(frame(DATA, b"x", END_STREAM, 1))
        await _assert_goes_on(client)
