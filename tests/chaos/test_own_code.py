"""Row 52 for custom image processors, on a real server: code that ends its process, or never ends."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from PIL import Image as Pillow

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engines
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.load import load_model
from staged_pool.stages.errors import ConfigError
from tests.chaos.harness import Attacked, eventually
from tests.chaos.images import WORKERS, body, rejection, settings, vectors
from tests.models.images.drawing import encode
from tests.models.tiny import build
from tests.servers.on_socket import serving
from tests.support.worker_processes import processes

pytestmark = [pytest.mark.anyio, pytest.mark.long]

CODE = '''
import os, threading
import numpy as np
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

class Moody(BaseImageProcessor):
    """What happens to an image is told by its first pixel."""

    model_input_names = ["pixel_values"]

    def preprocess(self, images, return_tensors=None, **kwargs):
        red = images.getpixel((0, 0))[0]
        if red == 1:
            os.abort()
        if red == 2:
            threading.Event().wait()
        values = np.asarray(images.resize((64, 64), 0), dtype=np.float32).transpose(2, 0, 1) / 255
        return BatchFeature({"pixel_values": [values]}, tensor_type=return_tensors)
'''


def dot(red: int, blue: int = 0) -> bytes:
    return encode(Pillow.new("RGB", (12, 12), (red, 0, blue)))


ABORTS, HANGS = dot(1), dot(2)


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder of CLIP whose image processor is code of its own."""
    root = tmp_path_factory.mktemp("models")
    folder = build("clip", root / "moody")
    (folder / "processor_config.json").unlink(missing_ok=True)
    (folder / "moody.py").write_text(CODE)
    said = {"auto_map": {"AutoImageProcessor": "moody.Moody"}, "image_processor_type": "Moody"}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MODULES_CACHE", str(root / "modules"))  # where the processes copy code to
        yield folder


def trusting(folder: Path, **others: Any) -> EngineConfig:
    return settings(folder, trust_remote_code=True, **others)


async def test_row_52_code_that_ends_its_process_or_never_ends_costs_its_own_request_and_a_thread_and_not_the_server(
    moody: Path, logged: list[Any]
) -> None:
    config = trusting(moody, preprocess_alarm_s=5)
    hung: list[int] = []
    async with serving(config, body_timeout_s=30) as served, served.client() as client:
        before = processes()
        assert len(before) == WORKERS
        alone = [vectors(await client.post("/v1/embeddings", json=body(dot(9, blue)))) for blue in range(6)]
        fire = Attacked(served=served)
        found: dict[int, httpx.Response] = {}

        async def ask(place: int, *images: bytes) -> None:
            found[place] = await client.post("/v1/embeddings", json=body(*images))

        async with anyio.create_task_group() as tasks:
            for blue in range(6):
                tasks.start_soon(ask, blue, dot(9, blue))
            tasks.start_soon(ask, 6, dot(9), ABORTS)
        assert rejection(found[6]) == (422, 1)
        for blue in range(6):
            assert np.abs(vectors(found[blue]) - alone[blue]).max() < 1e-5
        await eventually(lambda: len(processes()) == WORKERS and processes() != before, processes)
        async with anyio.create_task_group() as tasks:

            async def hang() -> None:
                hung.append((await client.post("/v1/embeddings", json=body(HANGS))).status_code)

            tasks.start_soon(hang)
            await eventually(lambda: served.engine.statistics().overdue_preprocess_calls == 1)
            for blue in range(6):
                assert (
                    np.abs(vectors(await client.post("/v1/embeddings", json=body(dot(9, blue)))) - alone[blue]).max()
                    < 1e-5
                )
            assert (await client.post("/v1/embeddings", json={"input": "a text"})).status_code == 200
            assert 'preprocess_overdue_calls{model="moody"} 1.0' in (await client.get("/metrics")).text
            assert (await client.get("/ready")).status_code == 200
            await eventually(lambda: any(event["event"] == "preprocess_images.overdue" for event in logged))
            left = fire._left()
            assert (left["threads of image"], left["preprocess_images busy"]) == (1, 1)
            await served.engine.drain(0.1)
    assert hung == [503]
    assert processes() == set()


async def test_a_model_that_cannot_be_loaded_leaves_no_process_of_those_before_it(
    moody: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ImageReader] = []
    close = ImageReader.close

    def counted(self: ImageReader) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(ImageReader, "close", counted)
    broken = tmp_path / "broken"
    shutil.copytree(moody, broken)
    (broken / "model.safetensors").write_bytes(b"")  # all folders are found before the first model is loaded
    with pytest.raises(ConfigError, match="safetensors"):
        async with open_engines([trusting(moody), replace(trusting(moody), model=str(broken))]):
            pass
    assert processes() == set()
    assert len(closed) == 1


def test_weights_that_cannot_be_loaded_leave_no_process(moody: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(moody, broken)
    (broken / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError) as caught:
        load_model(trusting(broken))
    assert processes() == set()
    assert "safetensors" in str(caught.value)
