"""The plugin in a server process, beside a host of GeoTIFFs."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from geo_segmentation.request import MAX_FILES
from tests.examples.file_host import HOLDS, FileHost, file_host
from tests.examples.geospatial.made_tiffs import NODATA, UTM, VRT, bomb, geotiff, placed, values
from tests.examples.geospatial.offline import Answer
from tests.examples.installed import installed
from tests.servers.byte_client import post
from tests.servers.process import ServerProcess, serve_command

pytestmark = pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")  # rasterio.merge, offline

MAX_BYTES = 2_000_000


@pytest.fixture(scope="module")
def host() -> Iterator[FileHost]:
    with file_host() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("geospatial")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    command = serve_command(
        "--plugin", "geo_segmentation", "--device", "cpu",
        "--allow-media-domain", "127.0.0.1", "--allow-media-path", str(folder),
        "--max-image-bytes", str(MAX_BYTES), "--max-image-pixels", "4000000",
    )  # fmt: skip
    with ServerProcess(command, folder / "log", environment=installed("geospatial", folder / "site")) as process:
        process.wait_ready()
        yield process
        assert process.end() == 0, process.log


SMALL = geotiff(values(60, 90))


def ask(server: ServerProcess, **data: Any) -> Answer:
    status, body = server.ask("/pooling", {"data": data, "task": "plugin"})
    assert status == 200, body
    assert set(body) == {"request_id", "created_at", "data"}
    return Answer(body["data"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((128, 128), {}),
        ((1, 1), {}),
        ((131, 397), {"compress": "lzw", "predictor": 2}),
        ((300, 257), {"dtype": "float32", "compress": "deflate", "interleave": "band"}),
        ((140, 150), {"dtype": "uint16", "tiled": True, "blockxsize": 64, "blockysize": 64}),
    ],
    ids=str,
)
def test_a_scene_of_any_size_and_type(
    server: ServerProcess, host: FileHost, shape: tuple[int, int], options: dict[str, Any]
) -> None:
    tiff = geotiff(values(*shape).clip(0), **options)
    ask(server, data=host.add("scene.tif", tiff), data_format="url", out_data_format="b64_json").assert_is(
        tiff, crs=UTM
    )


def test_no_data_stays_no_data(server: ServerProcess, host: FileHost) -> None:
    bands = values(150, 200)
    bands[0, 20:60, 30:70] = bands[:, 100:, 150:] = NODATA
    tiff = geotiff(bands, nodata=NODATA)
    answer = ask(server, data=host.add("holes.tif", tiff))
    answer.assert_is(tiff, crs=UTM)
    assert (answer.mask[20:60, 30:70] == 255).all()
    assert (answer.mask == 255).sum() == 40 * 40 + 50 * 50


def test_bands_are_chosen_by_their_places(server: ServerProcess, host: FileHost) -> None:
    tiff = geotiff(values(100, 140, bands=13))
    indices = (1, 2, 3, 8, 11, 12)
    answer = ask(server, data=host.add("sentinel.tif", tiff), indices=list(indices))
    answer.assert_is(tiff, crs=UTM, indices=indices)


def test_other_projections_are_kept(server: ServerProcess, host: FileHost) -> None:
    tiff = geotiff(values(60, 70), crs="EPSG:4326", transform=placed(pixel=0.001))
    ask(server, data=host.add("degrees.tif", tiff)).assert_is(tiff, crs="EPSG:4326")


def test_tiles_of_a_scene_are_joined(server: ServerProcess, host: FileHost) -> None:
    whole = values(256, 300)
    tiffs = [
        geotiff(whole[:, top : top + 128, left : left + 100], transform=placed(top, left))
        for top in (0, 128)
        for left in (0, 100, 200)
    ]
    urls = [host.add(f"tile-{index}.tif", tiff) for index, tiff in enumerate(tiffs)]
    ask(server, data=urls).assert_is(geotiff(whole), crs=UTM)


def test_files_and_base64_are_sources_too(server: ServerProcess, folder: Path) -> None:
    path = folder / "on disk.tif"
    path.write_bytes(SMALL)
    ask(server, data=str(path), data_format="path").assert_is(SMALL, crs=UTM)
    ask(server, data=base64.b64encode(SMALL).decode(), data_format="b64_json").assert_is(SMALL, crs=UTM)


def test_many_requests_at_once_each_get_their_own_mask(server: ServerProcess, host: FileHost) -> None:
    tiffs = [geotiff(values(60 + 17 * seed, 200 - 9 * seed, seed=seed)) for seed in range(8)]
    urls = [host.add(f"many-{index}.tif", tiff) for index, tiff in enumerate(tiffs)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda index: ask(server, data=urls[index % 8]), range(32)))
    for index, answer in enumerate(answers):
        answer.assert_is(tiffs[index % 8], crs=UTM)


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"%PDF-1.7 no TIFF", 422, "data.data is not a GeoTIFF: a TIFF begins with the bytes II or MM"),
        (VRT, 422, "data.data is not a GeoTIFF"),
        (b"II" + VRT, 422, "data.data is not a GeoTIFF that can be opened: it is damaged or ends early"),
        (bomb(), 413, "data.data is 30000 x 30000 pixels of 6 bands, which are 5400000000 values: at most 4000000"),
        (geotiff(values(60, 60, bands=4)), 400, "data.data has 4 bands, and the model reads 6 (blue, green, red"),
        (geotiff(values(60, 60), crs=None), 422, "data.data has no georeference"),
        (SMALL[: len(SMALL) // 2], 422, "data.data has pixels that cannot be read"),
        (bytes(MAX_BYTES + 1), 413, f"data.data: The image is larger than this server's limit of {MAX_BYTES} bytes"),
        (None, 422, "data.data: The host of the image answered with status 404"),
    ],
    ids=["no tiff", "vrt", "vrt behind II", "bomb", "bands", "no place", "half", "oversize", "404"],
)
def test_a_bad_file_gets_a_clear_error(
    server: ServerProcess, host: FileHost, content: bytes | None, status: int, says: str
) -> None:
    url = host.url("missing.tif") if content is None else host.add("bad.tif", content)
    assert_fails(server, status, says, data=url)


def assert_fails(server: ServerProcess, status: int, says: str, param: str = "data.data", **data: Any) -> None:
    answered, body = server.ask("/pooling", {"data": data})
    assert (answered, body["error"]["param"]) == (status, param), body
    assert says in body["error"]["message"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://10.0.0.1/scene.tif", "leads to a host that this server does not fetch from"),
        ("http://localhost:{port}/scene.tif", "leads to a host that this server does not fetch from"),
        ("http://[::1]:{port}/scene.tif", "leads to a host that this server does not fetch from"),
        ("http://127.0.0.1:22/scene.tif", "has a port that is kept for another service"),
        ("file:///etc/hostname", "names a file outside of the folder that is open to requests"),
        ("/vsicurl/http://127.0.0.1:{port}/scene.tif", "is not one of http, https or file"),
    ],
)
def test_a_private_host_is_not_asked(server: ServerProcess, host: FileHost, url: str, says: str) -> None:
    host.add("scene.tif", SMALL)
    asked = len(host.asked)
    assert_fails(server, 400, says, data=url.format(port=host.port))
    assert len(host.asked) == asked


def test_wrong_fields_get_a_clear_error(server: ServerProcess, host: FileHost) -> None:
    url = host.add("scene.tif", SMALL)
    assert_fails(server, 400, "must have 1 to 16 GeoTIFFs", "data.data", data=[url] * (MAX_FILES + 1))
    assert_fails(server, 400, "data.data has 6 bands", "data.indices", data=url, indices=[0, 1, 2, 3, 4, 9])
    assert_fails(server, 400, "writes no files", "data.out_data_format", data=url, out_data_format="path")
    shifted = host.add("shifted.tif", geotiff(values(60, 90), transform=placed(60.5)))
    assert_fails(server, 400, "is shifted by a part of a pixel", "data.data[1]", data=[url, shifted])


def test_a_client_who_leaves_ends_its_fetch(server: ServerProcess, host: FileHost) -> None:
    host.files["held.tif"] = HOLDS
    body = json.dumps({"data": {"data": host.url("held.tif")}}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(post(body, path="/pooling"))
        assert host.is_held.wait(20)
    assert host.was_left.wait(20)
    server.wait_until(lambda: server.ask("/load")[1]["server_load"] == 0)
    ask(server, data=host.add("scene.tif", SMALL)).assert_is(SMALL, crs=UTM)
