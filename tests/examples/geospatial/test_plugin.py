"""The plugin in an engine, on each event loop: masks, batches over requests, and callers who leave."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from geo_segmentation.arrays import Bands, Mask
from geo_segmentation.plugin import GeoSegmentation
from geo_segmentation.tiles import EDGE
from staged_pool import EngineConfig, InvalidInput, PluginSetup, TooLarge, UnusableMedia, open_engine
from staged_pool.runtime.plugins.processor import PluginClass
from tests.examples.geospatial.made_tiffs import NODATA, UTM, VRT, bomb, geotiff, placed, values
from tests.examples.geospatial.offline import Answer
from tests.runtime.media.origin import LOCAL, Origin, answer, origin
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning"),  # rasterio.merge, of the offline way
]

CONFIG = EngineConfig(allow_media_domains=(LOCAL,), device="cpu", torch_threads=1)


class Watched(GeoSegmentation):
    """The plugin, of which the sizes of batches are seen."""

    def __init__(self, setup: PluginSetup) -> None:
        super().__init__(setup)
        self.batches: list[int] = []

    def forward(self, batch: Sequence[Bands]) -> Sequence[Mask]:
        self.batches.append(len(batch))
        return super().forward(batch)


def url(host: Origin, path: str) -> str:
    return host.url(path, host=LOCAL)


SCENE = geotiff(values(200, 300), compress="lzw")
SCENES = [geotiff(values(70 + 9 * seed, 150 + 31 * seed, seed=seed)) for seed in range(12)]
TILE = geotiff(values(EDGE, EDGE))
WHOLE = values(190, 260)
WHOLE[:, 150:170, 90:110] = NODATA
QUARTERS = [
    geotiff(WHOLE[:, top : top + 100, left : left + 130], transform=placed(top, left), nodata=NODATA)
    for top, left in ((0, 0), (0, 130), (100, 0))
]
"""Three quarters of a scene, of which the last is a gap."""
BAD: dict[str, tuple[bytes, type[Exception]]] = {
    "/vrt": (VRT, UnusableMedia),
    "/bomb": (bomb(), TooLarge),
    "/bands": (geotiff(values(60, 60, bands=3)), InvalidInput),
    "/half": (geotiff(values(60, 60))[:15_000], UnusableMedia),
}


async def read(output: Any, *tiffs: bytes) -> Answer:
    """Read an output, and compare it with the offline computation; in a thread, because files block."""

    def check() -> Answer:
        found = Answer(output)
        found.assert_is(*tiffs, crs=UTM)
        return found

    return await anyio.to_thread.run_sync(check)


async def test_a_scene_from_a_url_is_segmented_as_it_is_offline() -> None:
    async with origin() as host, open_engine(CONFIG, plugins=[GeoSegmentation]) as engine:
        host.pages["/scene.tif"] = answer(SCENE)
        await read(await engine.process({"data": url(host, "/scene.tif")}), SCENE)


async def test_requests_at_once_share_batches_and_keep_their_own_answers() -> None:
    outputs: dict[int, Any] = {}
    made: list[Watched] = []

    def make(setup: PluginSetup) -> Watched:
        made.append(Watched(setup))
        return made[0]

    async with open_engine(CONFIG, plugins=[PluginClass("watched", make)]) as engine:

        async def ask(index: int) -> None:
            data = {"data": base64.b64encode(SCENES[index]).decode(), "data_format": "b64_json"}
            outputs[index] = await engine.process(data)

        async with anyio.create_task_group() as tasks:
            for index in range(len(SCENES)):
                tasks.start_soon(ask, index)
    for index, tiff in enumerate(SCENES):
        await read(outputs[index], tiff)
    (plugin,) = made
    tiles = [-(-(70 + 9 * seed) // EDGE) * -(-(150 + 31 * seed) // EDGE) for seed in range(12)]
    assert sum(plugin.batches) == sum(tiles)
    assert len(plugin.batches) < sum(tiles)


async def test_tiles_of_several_files_make_one_mask() -> None:
    async with origin() as host, open_engine(CONFIG, plugins=[GeoSegmentation]) as engine:
        for index, tiff in enumerate(QUARTERS):
            host.pages[f"/{index}.tif"] = answer(tiff)
        output = await engine.process({"data": [url(host, f"/{index}.tif") for index in range(3)]})
    mask = (await read(output, *QUARTERS)).mask
    assert (mask[100:, 130:] == 255).all()
    assert (mask[150:170, 90:110] == 255).all()
    assert (mask[:100] != 255).all()


async def test_one_bad_request_fails_alone() -> None:
    failed: list[str] = []
    outputs: list[Any] = []
    async with origin() as host, open_engine(CONFIG, plugins=[GeoSegmentation]) as engine:

        async def ask(path: str) -> None:
            outputs.append(await engine.process({"data": url(host, path)}))

        async def ask_wrongly(path: str, kind: type[Exception]) -> None:
            with pytest.raises(kind, match=r"^data\.data "):
                await ask(path)
            failed.append(path)

        host.pages |= {path: answer(content) for path, (content, _) in BAD.items()}
        host.pages["/good"] = answer(SCENE)
        async with anyio.create_task_group() as tasks:
            for path, (_, kind) in BAD.items():
                tasks.start_soon(ask_wrongly, path, kind)
                tasks.start_soon(ask, "/good")
    assert sorted(failed) == sorted(BAD)
    assert len(outputs) == len(BAD)
    for output in outputs:
        await read(output, SCENE)


async def test_a_caller_who_leaves_ends_its_fetches_and_frees_its_place() -> None:
    async with origin() as host, open_engine(CONFIG, plugins=[GeoSegmentation]) as engine:
        waiting = 0

        async def silent(stream: Any) -> None:
            nonlocal waiting
            waiting += 1
            with pytest.raises(anyio.EndOfStream):
                await stream.receive()
            waiting -= 1

        host.pages = {"/silent": silent, "/scene": answer(TILE)}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.process, {"data": [url(host, "/silent"), url(host, "/scene")]})
            await until(lambda: waiting == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: waiting == 0 and engine.statistics().admission.requests == 0)
        assert (await engine.process({"data": url(host, "/scene")}))["width"] == EDGE
