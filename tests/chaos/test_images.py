"""Rows 35 to 39 on a real image model: damaged and poisonous images and decompression bombs, alone and among others.

Rows 44 to 48, about image hosts, are in `test_image_hosts.py`.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageOps

from staged_pool.runtime.models.encoder import Encoder
from staged_pool.runtime.models.images.decode import Encoded
from staged_pool.runtime.models.images.decoded import Decoded
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.load import load_model
from staged_pool.runtime.requests import Image, Output
from tests.chaos.harness import Attacked, eventually
from tests.chaos.images import WORKERS, Vector, attacked, body, rejection, settings, vectors
from tests.models.images.drawing import chunk, drawing, encode, png
from tests.models.requests import embed
from tests.models.tiny import build
from tests.servers.byte_client import post, read_answer
from tests.servers.on_socket import Served, serving
from tests.support.gates import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

FRAMES = 10_000
CLOSE = 1e-4
"""Largest distance of a vector from the model's own. Two images differ by far more."""
SOLE, SOLE_SIZE = encode(drawing(90, 70, 1)), (70, 90)
OTHER = encode(drawing(64, 80, 2), "JPEG")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("clip", tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def right(clip: Path) -> Callable[[Sequence[bytes]], Vector]:
    """The vectors of images, as the model gives them without a server."""
    model = load_model(settings(clip))

    def vectors(images: Sequence[bytes]) -> Vector:
        found = embed(model, [Image(data) for data in images], Output.DENSE, alone=True).dense
        assert found is not None
        return found

    return vectors


@pytest.fixture
async def image_server(clip: Path, anyio_backend: object) -> AsyncIterator[Attacked]:
    async with attacked(settings(clip)) as fire:
        yield fire


def hold(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate in front of every thread that is about to decode an image."""
    gate, load = Gate(), Encoded.load

    def held(self: Encoded, *arguments: Any) -> Decoded:
        gate()
        return load(self, *arguments)

    monkeypatch.setattr(Encoded, "load", held)
    return gate


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Height and width of each image that is decoded from now on."""
    decoded: list[tuple[int, int]] = []
    load = Encoded.load

    def watched(self: Encoded, *arguments: Any) -> Decoded:
        decoded.append(self.size)
        return load(self, *arguments)

    monkeypatch.setattr(Encoded, "load", watched)
    return decoded


def is_busy(served: Served, stage: str, workers: int) -> bool:
    """True if that many workers of a stage have work."""
    return any(one.name == stage and one.busy == workers for one in served.engine.statistics().stages)


# Row 35


async def test_row_35_invalid_base64_of_an_image_is_rejected_by_its_place(image_server: Attacked) -> None:
    whole = base64.b64encode(SOLE).decode()
    padded = base64.b64encode(SOLE + bytes(-len(SOLE) % 3 + 1)).decode()
    assert padded.endswith("==")
    wrong = {
        "a character too few": whole.rstrip("=")[: len(whole) // 4 * 4 - 3],
        "too much padding": padded + "=",
        "padding inside": whole[:40] + "==" + whole[40:],
        "a character of none": whole[:50] + "*" + whole[51:],
        "not ASCII": whole[:50] + "é" + whole[51:],
        "NUL": whole[:50] + "\0" + whole[51:],
        "empty": "",
        "no comma": "data:image/png;base64",
        "nothing": "data:image/png;base64,",
    }
    async with image_server.served.client() as client:
        for name, given in wrong.items():
            response = await client.post("/v1/embeddings", json=body(SOLE, given))
            assert rejection(response) == (400, 1), (name, response.text)
            assert given[:40] not in response.text or len(given) < 40


async def test_row_35_base64_in_lines_and_a_wrong_type_of_image_are_read(
    image_server: Attacked, right: Callable[[Sequence[bytes]], Vector]
) -> None:
    whole = base64.b64encode(SOLE).decode()
    written = [
        base64.encodebytes(SOLE).decode(),
        f"data:image/jpeg;base64,{whole}",  # which is a PNG
        f"data:text/html;base64,{whole}",
        f"data:;base64,{whole}",
        "data:," + "".join(f"%{byte:02X}" for byte in SOLE),
        base64.urlsafe_b64encode(SOLE).decode().rstrip("="),
    ]
    async with image_server.served.client() as client:
        found = vectors(await client.post("/v1/embeddings", json=body(*written)))
    assert np.abs(found - right([SOLE] * len(written))).max() < CLOSE


# Rows 36 to 38


def bombs() -> Mapping[str, tuple[bytes, int]]:
    packed = zlib.compress(bytes(50 * 2**20), 9)
    jpeg = bytearray(encode(drawing(8, 8), "JPEG"))
    size = jpeg.index(b"\xff\xc0") + 5
    jpeg[size : size + 4] = struct.pack(">HH", 65_000, 65_000)
    return {
        "a PNG of 50000 x 50000": (png(50_000, 50_000, data=bytes(10)), 413),
        "a PNG of 12000 x 12000": (encode(Pillow.new("1", (12_000, 12_000))), 413),
        "a JPEG of 65000 x 65000": (bytes(jpeg), 413),
        "a GIF of 65000 x 65000": (
            b"GIF89a" + struct.pack("<HH", 65_000, 65_000) + encode(drawing(8, 8), "GIF")[10:],
            413,
        ),
        "a text that unpacks": (png(4, 4, (b"zTXt", b"comment\0\0" + packed), data=bytes(4 * 13)), 422),
        "a profile that unpacks": (png(4, 4, (b"iCCP", b"profile\0\0" + packed), data=bytes(4 * 13)), 422),
        "no height": (png(16, 0, data=bytes(10)), 422),
        "no width": (png(0, 16, data=bytes(10)), 422),
        "a line": (encode(Pillow.new("RGB", (1, 65_535))), 422),
        "a line that lies": (encode(Pillow.new("RGB", (65_535, 1))), 422),
        "half a JPEG": (OTHER[: len(OTHER) // 2], 422),
        "half a PNG": (SOLE[: len(SOLE) // 2], 422),
        "an end behind the head": (SOLE[:33], 422),
        "a text": (b"no image at all", 415),
        "a TIFF": (encode(drawing(8, 8), "TIFF"), 415),
        "an EPS": (encode(drawing(8, 8), "EPS"), 415),
        "an ICO": (encode(drawing(16, 16), "ICO"), 415),
        "a PPM": (encode(drawing(8, 8), "PPM"), 415),
        "a FITS": (b"SIMPLE  =                    T".ljust(2880), 415),
        "a PSD": (b"8BPS\0\1" + bytes(6) + struct.pack(">HIIHH", 3, 8, 8, 8, 3) + bytes(100), 415),
        "a PDF": (b"%PDF-1.7\n%%EOF", 415),
        "an SVG": (b'<svg xmlns="http://www.w3.org/2000/svg" onload="x()"/>', 415),
        "a ZIP": (b"PK\x03\x04" + bytes(100), 415),
        "a PNG behind a PDF": (b"%PDF-1.7\n" + SOLE, 415),
    }


async def test_rows_36_to_38_an_unreadable_image_fails_its_request_by_its_place(
    image_server: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = counted(monkeypatch)
    async with image_server.served.client() as client:
        for name, (data, status) in bombs().items():
            response = await client.post("/v1/embeddings", json=body(SOLE, data))
            assert rejection(response) == (status, 1), (name, response.text)
    assert max(height * width for height, width in decoded) < 10_000, "a bomb was decoded"


def modes() -> dict[str, tuple[bytes, bytes]]:
    """Return files of every kind, each with a plain PNG of the same pixels."""
    source = drawing(96, 64, 5)
    turned = Pillow.Exif()
    turned[0x0112] = 6
    palette = source.quantize(17)
    glass = source.copy()
    glass.putalpha(Pillow.linear_gradient("L").resize(source.size))
    frames = [drawing(96, 64, seed) for seed in range(6, 12)]
    deep = Pillow.fromarray(np.arange(64 * 96, dtype=np.uint16).reshape(64, 96) * 10)
    files = {
        "CMYK": encode(source.convert("CMYK"), "JPEG", quality=95),
        "grey": encode(source.convert("L")),
        "16 bits": encode(deep),
        "palette": encode(palette),
        "alpha": encode(glass),
        "turned": encode(source, "JPEG", exif=turned),
        "turned PNG": encode(source, exif=turned),
        "film": encode(source, "GIF", save_all=True, append_images=frames),
        "WebP film": encode(source, "WEBP", save_all=True, append_images=frames, lossless=True),
        "a ZIP behind it": SOLE + b"PK\x03\x04" + bytes(200),
    }
    return {name: (data, encode(_seen(data))) for name, data in files.items()}


def _seen(data: bytes) -> Pillow.Image:
    """Render a file on white, as a viewer does."""
    source = Pillow.open(BytesIO(data))
    upright = ImageOps.exif_transpose(source)
    if upright.mode.startswith("I;16"):
        return Pillow.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    if upright.mode == "RGBA":
        return Pillow.alpha_composite(Pillow.new("RGBA", upright.size, "white"), upright).convert("RGB")
    return upright.convert("RGB")


async def test_row_38_files_of_every_kind_give_what_is_seen_in_them_and_never_what_is_in_another(
    image_server: Attacked, right: Callable[[Sequence[bytes]], Vector]
) -> None:
    files = modes()
    wanted = right([shown for _, shown in files.values()])
    async with image_server.served.client() as client:
        found = vectors(await client.post("/v1/embeddings", json=body(*(data for data, _ in files.values()))))
    apart = dict(zip(files, np.abs(found - wanted).max(axis=1).tolist(), strict=True))
    assert max(apart.values()) < 0.01, apart


def films() -> dict[str, tuple[bytes, bytes]]:
    """Files of ten thousand frames, and each as a file of its first one."""
    shown = drawing(48, 48, 3)
    still, still_gif, dot = encode(shown), encode(shown, "GIF"), encode(Pillow.new("P", (1, 1)), "GIF")
    frame = dot[dot.index(b",") : -1]  # from the descriptor of its image on, without the end of the file
    gif = still_gif[:-1] + frame * FRAMES + b";"

    head, end = still.index(b"IDAT") - 4, still.rindex(b"IEND") - 4
    frames = b"".join(
        chunk(b"fcTL", struct.pack(">IIIIIHHBB", 2 * number, 1, 1, 0, 0, 1, 10, 0, 0))
        + chunk(b"fdAT", struct.pack(">I", 2 * number + 1) + zlib.compress(bytes(4)))
        for number in range(FRAMES)
    )
    counted = chunk(b"acTL", struct.pack(">II", FRAMES, 0))
    apng = still[:head] + counted + still[head:end] + frames + still[end:]

    webp = encode(shown, "WEBP", save_all=True, append_images=[Pillow.new("RGB", shown.size)], lossless=True)
    last = webp.rindex(b"ANMF")
    webp = webp[:last] + webp[last:] * FRAMES
    webp = webp[:4] + struct.pack("<I", len(webp) - 8) + webp[8:]

    return {"GIF": (gif, still_gif), "APNG": (apng, still), "WebP": (webp, still)}


async def test_row_37_of_ten_thousand_frames_one_is_looked_at(
    image_server: Attacked, right: Callable[[Sequence[bytes]], Vector]
) -> None:
    files = films()
    wanted = right([first for _, first in files.values()])
    async with image_server.served.client() as client:
        with anyio.fail_after(10):
            found = vectors(await client.post("/v1/embeddings", json=body(*(film for film, _ in files.values()))))
    apart = dict(zip(files, np.abs(found - wanted).max(axis=1).tolist(), strict=True))
    assert max(apart.values()) < CLOSE, apart


# Row 39


async def test_row_39_a_damaged_image_among_31_good_ones_fails_its_own_request_and_no_other(
    image_server: Attacked, right: Callable[[Sequence[bytes]], Vector]
) -> None:
    good = [encode(drawing(40 + seed, 60, seed), "JPEG" if seed % 2 else "PNG") for seed in range(31)]
    wanted = right(good)
    answers: dict[int, httpx.Response] = {}

    async with image_server.served.client() as client:

        async def ask(place: int, *images: bytes) -> None:
            answers[place] = await client.post("/v1/embeddings", json=body(*images))

        async with anyio.create_task_group() as tasks:
            for place, data in enumerate(good):
                tasks.start_soon(ask, place, data)
            tasks.start_soon(ask, 31, OTHER[:300])
            tasks.start_soon(ask, 32, *[*good[:20], SOLE[:200], *good[20:]])
    assert rejection(answers[31]) == (422, 0)
    assert rejection(answers[32]) == (422, 20)
    for place, vector in enumerate(wanted):
        assert np.abs(vectors(answers[place])[0] - vector).max() < CLOSE, place


async def test_a_hundred_clients_at_once_get_the_vectors_of_their_own_images(
    clip: Path, right: Callable[[Sequence[bytes]], Vector]
) -> None:
    images = [encode(drawing(30 + seed, 50, seed), "JPEG" if seed % 2 else "PNG") for seed in range(30)]
    wanted = right(images)
    apart: list[float] = []
    patient = settings(clip, image_cache_mb=1, target_delay_s=1000.0)  # the cache is too small for all of them
    async with attacked(patient) as fire:
        limits = httpx.Limits(max_connections=100)
        async with fire.served.client(limits=limits) as client, anyio.create_task_group() as tasks:

            async def ask(number: int) -> None:
                first, second = number % 30, (number * 7 + 3) % 30
                found = vectors(await client.post("/v1/embeddings", json=body(images[first], images[second])))
                apart.append(float(np.abs(found - wanted[[first, second]]).max()))

            for number in range(100):
                tasks.start_soon(ask, number)
        assert len(apart) == 100
        assert max(apart) < CLOSE
        cache = fire.served.engine.statistics().image_cache
        assert cache is not None
        assert cache.hits + cache.misses == 201  # and that of the harness
        assert cache.hits > 0
        assert 0 < cache.bytes <= cache.max_bytes == 10**6


# Clients that leave, and clients that come during the shutdown


async def test_a_client_who_leaves_while_its_images_are_decoded_makes_room_and_none_of_it_begins_any_more(
    clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    prepare = ImageReader.prepare

    def counted(self: ImageReader, data: bytes, *more: Any) -> Any:
        begun.append(len(data))
        return prepare(self, data, *more)

    async with serving(settings(clip), body_timeout_s=30) as served:
        await served.assert_alive()
        fire = Attacked(served=served)
        monkeypatch.setattr(ImageReader, "prepare", counted)
        gate = hold(monkeypatch)
        computed = served.engine.statistics().device.items
        mine = [encode(drawing(40 + seed, 40, seed)) for seed in range(8)]
        async with await served.connect() as stream:
            await stream.send(post(json.dumps(body(*mine)).encode()))
            await gate.arrived()
            await until(lambda: len(begun) == WORKERS)
        await until(lambda: served.in_flight == 0)  # though two threads still hold its images
        assert served.engine.statistics().cancelled == {"preprocess_images": 1}
        await served.assert_alive()
        gate.open()
        await eventually(lambda: not fire._left(), fire._left)
        assert len(begun) == WORKERS
        await served.assert_alive()
        assert served.engine.statistics().device.items == computed + 2  # those of the harness
        await fire.assert_unharmed()


@pytest.mark.parametrize("leaver", [0, 1], ids=["who decodes it", "who waits for it"])
async def test_an_image_of_ten_requests_is_decoded_once_whichever_of_them_leaves(
    leaver: int, clip: Path, right: Callable[[Sequence[bytes]], Vector], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, answers = right([SOLE]), list[httpx.Response]()
    async with attacked(settings(clip, image_cache_mb=10)) as fire, fire.served.client() as client:
        served = fire.served

        async def ask() -> None:
            answers.append(await client.post("/v1/embeddings", json=body(SOLE)))

        decoded = counted(monkeypatch)
        gate = hold(monkeypatch)
        leaving = [await served.connect() for _ in range(WORKERS)]
        for stream, workers in zip(leaving, (1, 2), strict=True):
            await stream.send(post(json.dumps(body(SOLE)).encode()))
            await gate.arrived()
            await until(partial(is_busy, served, "preprocess_images", workers))
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
            await until(lambda: served.in_flight == 10)
            await leaving[leaver].aclose()
            await until(lambda: served.in_flight == 9)
            gate.open()
        stays = leaving[1 - leaver]
        assert b" 200 " in (await read_answer(stays)).split(b"\r\n")[0]
        await stays.aclose()
        cache = served.engine.statistics().image_cache
    assert len(answers) == 8
    for answer in answers:
        assert np.abs(vectors(answer) - wanted).max() < CLOSE
    assert decoded == [SOLE_SIZE]
    assert cache is not None
    assert cache.misses == 2  # one is the harness's


async def test_images_are_decoded_while_others_of_their_request_are_on_the_device(
    clip: Path, right: Callable[[Sequence[bytes]], Vector], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [encode(drawing(40 + seed, 40, seed)) for seed in range(60)]
    wanted, answers = right(mine), list[httpx.Response]()
    device, forward, given = Gate(), Encoder.forward, list[int]()
    decoded: list[tuple[int, int]] = []

    def held(self: Encoder, payloads: Sequence[Any], *more: Any) -> Any:
        if decoded:  # not for the harness
            given.append(len(payloads))
            device()
        return forward(self, payloads, *more)

    monkeypatch.setattr(Encoder, "forward", held)
    async with attacked(settings(clip)) as fire, fire.served.client() as client:
        decoded = counted(monkeypatch)

        async def ask() -> None:
            answers.append(await client.post("/v1/embeddings", json=body(*mine)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            try:
                await device.arrived()
                await until(lambda: len(decoded) == len(mine))
                on_device = sum(given)
            finally:
                device.open()
    assert 0 < on_device < len(mine)
    assert np.abs(vectors(answers[0]) - wanted).max() < CLOSE


@pytest.mark.parametrize(
    ("crash", "told"),
    [
        (MemoryError, (503, None, "memory.exhausted")),  # for the moment: the same image may be sent again
        (AssertionError, (424, 1, "item.failed")),
        (RecursionError, (424, 1, "item.failed")),
    ],
)
async def test_a_decoder_that_crashes_fails_the_request_of_its_image_and_no_other(
    crash: type[Exception],
    told: tuple[int, int | None, str],
    clip: Path,
    right: Callable[[Sequence[bytes]], Vector],
    *,
    monkeypatch: pytest.MonkeyPatch,
    logged: list[Any],
) -> None:
    good = [encode(drawing(40 + seed, 60, seed)) for seed in range(8)]
    wanted, answers = right(good), dict[int, httpx.Response]()
    load = Encoded.load

    def crashing(self: Encoded, *arguments: Any) -> Decoded:
        if self.size == SOLE_SIZE:
            raise crash("a secret of the decoder")
        return load(self, *arguments)

    async with attacked(settings(clip)) as fire, fire.served.client() as client:
        monkeypatch.setattr(Encoded, "load", crashing)

        async def ask(place: int, *images: bytes) -> None:
            answers[place] = await client.post("/v1/embeddings", json=body(*images))

        async with anyio.create_task_group() as tasks:
            for place, data in enumerate(good):
                tasks.start_soon(ask, place, data)
            tasks.start_soon(ask, 8, good[0], SOLE, good[1])
    status, index, said = told
    assert rejection(answers[8]) == (status, index)
    assert "secret" not in answers[8].text
    for asked, vector in enumerate(wanted):
        assert np.abs(vectors(answers[asked])[0] - vector).max() < CLOSE, asked
    assert [event["event"] for event in logged if event["event"] in ("item.failed", "memory.exhausted")] == [said]


async def test_a_drain_waits_for_images_that_are_being_decoded(
    clip: Path, right: Callable[[Sequence[bytes]], Vector], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [encode(drawing(40 + seed, 40, seed)) for seed in range(5)]
    wanted = right(mine)
    answers: list[httpx.Response] = []
    async with serving(settings(clip), body_timeout_s=30) as served, served.client() as client:
        gate = hold(monkeypatch)

        async def ask() -> None:
            answers.append(await client.post("/v1/embeddings", json=body(*mine)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await gate.arrived()
            tasks.start_soon(served.server.close)
            await until(lambda: served.engine.phase == "draining")
            late = await client.post("/v1/embeddings", json=body(SOLE))
            assert late.status_code == 503, late.text
            gate.open()
    assert np.abs(vectors(answers[0]) - wanted).max() < CLOSE


async def test_the_cache_of_images_is_seen_and_can_be_emptied(clip: Path) -> None:
    async with attacked(settings(clip, image_cache_mb=10)) as fire, fire.served.client() as client:
        for _ in range(3):
            await client.post("/v1/embeddings", json=body(SOLE))
        shown = (await client.get("/stages")).json()["models"]["clip"]["image_cache"]
        assert (shown["hits"], shown["misses"], shown["entries"]) == (2, 2, 2)  # one is the harness's
        text = (await client.get("/metrics")).text
        assert 'staged_pool_image_cache_hits_total{model="clip"} 2.0' in text
        assert 'staged_pool_image_cache_misses_total{model="clip"} 2.0' in text
        assert f'staged_pool_image_cache_bytes{{model="clip"}} {float(shown["bytes"])}' in text
        for misses, path in ((2, "/reset_mm_cache"), (3, "/flush_cache")):
            assert (await client.post(path)).status_code == 200
            emptied = (await client.get("/stages")).json()["models"]["clip"]["image_cache"]
            assert (emptied["entries"], emptied["bytes"], emptied["misses"]) == (0, 0, misses)
            await client.post("/v1/embeddings", json=body(SOLE))
        assert cast(Any, fire.served.engine.statistics().image_cache).misses == 4


async def test_a_server_that_keeps_no_images_speaks_of_no_cache(image_server: Attacked) -> None:
    async with image_server.served.client() as client:
        assert (await client.get("/stages")).json()["models"]["clip"]["image_cache"] is None
        assert "image_cache" not in (await client.get("/metrics")).text
