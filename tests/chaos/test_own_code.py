"""Row 52, and more, for image processors that are code of the model folder: on a real server, code that ends its
process, or never ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import numpy as np
import psutil
import pytest
from PIL import Image as Pillow

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.opening import open_engines
from staged_pool.stages.errors import ConfigError
from tests.api.serving import post
from tests.chaos.harness import Attacked, eventually
from tests.chaos.test_pictures import attacked, body, refusal, settings, vectors
from tests.models.images.pictures import encode
from tests.models.tiny import build

pytestmark = pytest.mark.anyio

CODE = '''
import os, threading
import numpy as np
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

class Moody(BaseImageProcessor):
    """What happens to a picture is told by its first pixel."""

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


def processes() -> set[int]:
    return {
        child.pid
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE and "own_code_process" in " ".join(child.cmdline())
    }


async def test_code_that_ends_its_process_fails_that_request_alone(moody: Path) -> None:
    async with attacked(trusting(moody)) as fire, fire.served.client() as client:
        before = processes()
        assert len(before) == 2
        alone = [vectors(await client.post("/v1/embeddings", json=body(dot(9, blue)))) for blue in range(6)]
        found: dict[int, httpx.Response] = {}

        async def ask(place: int, *pictures: bytes) -> None:
            found[place] = await client.post("/v1/embeddings", json=body(*pictures))

        async with anyio.create_task_group() as tasks:
            for blue in range(6):
                tasks.start_soon(ask, blue, dot(9, blue))
            tasks.start_soon(ask, 6, dot(9), ABORTS)
        assert refusal(found[6]) == (422, 1)
        for blue in range(6):
            assert np.abs(vectors(found[blue]) - alone[blue]).max() < 1e-5
        await eventually(lambda: len(processes()) == 2 and processes() != before, processes)
    assert processes() == set()


async def test_row_52_code_that_hangs_costs_a_thread_and_an_alarm_and_neither_other_pictures_nor_the_end(
    moody: Path, logged: list[Any]
) -> None:
    ended = anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def be_hung() -> None:
            config = trusting(moody, preprocess_alarm_s=0.2, drain_timeout_s=0.2)
            async with open_engines([config]) as engines:
                (engine,) = engines.values()
                async with anyio.create_task_group() as callers:
                    callers.start_soon(embed_quietly, engine, HANGS)
                    await eventually(lambda: engine.statistics().overdue_preprocess_calls == 1)
                    for blue in range(4):
                        assert len((await engine.embed([picture_of(dot(9, blue))])).embeddings) == 1
                    assert len((await engine.embed(["a text"])).embeddings) == 1
                    assert engine.fault is None
                    overdue = [event for event in logged if event["event"] == "preprocess_images.overdue"]
                    assert overdue[-1]["calls"] == 1
                    callers.cancel_scope.cancel()
                assert engine.statistics().admission.requests == 0  # the caller has left, the thread has not come back
            ended.set()

        tasks.start_soon(be_hung)
        with anyio.fail_after(60):
            await ended.wait()
    assert processes() == set()
