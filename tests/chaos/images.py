"""A server of a real image model, and the requests to it."""

from __future__ import annotations

import base64
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.config import EngineConfig
from tests.chaos.harness import Attacked
from tests.models.images.drawing import drawing, encode
from tests.servers.on_socket import serving

Vector: TypeAlias = NDArray[np.float32]

WORKERS = 2
"""Images that are prepared at once."""
MAX_PIXELS = 1_000_000


def settings(folder: Path, **others: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        torch_threads=1,
        forward_workers=1,
        image_preprocess_limit=WORKERS,
        max_image_pixels=MAX_PIXELS,
        **others,
    )


@asynccontextmanager
async def attacked(engine: EngineConfig) -> AsyncIterator[Attacked]:
    """A server of a real model; afterwards it must be as it was."""
    async with serving(engine, body_timeout_s=30) as served:
        await served.assert_alive()
        async with served.client() as client:
            assert (await client.post("/v1/embeddings", json=body(encode(drawing(64, 80, 2))))).status_code == 200
        gc.collect()
        fire = Attacked(served=served)
        yield fire
        await fire.assert_unharmed()


def body(*images: bytes | str) -> dict[str, Any]:
    return {"input": [{"image": one if isinstance(one, str) else base64.b64encode(one).decode()} for one in images]}


def vectors(response: httpx.Response) -> Vector:
    assert response.status_code == 200, response.text
    return np.array([row["embedding"] for row in response.json()["data"]], dtype=np.float32)


def rejection(response: httpx.Response) -> tuple[int, int | None]:
    """Status and index of an error, which says nothing of the inside."""
    message = response.json()["error"]["message"]
    assert len(message) < 1000
    for leak in ("Traceback", 'File "', ".py", "/tmp", "PIL", "staged_pool", "0x"):
        assert leak not in message
    return response.status_code, response.json()["error"].get("index")
