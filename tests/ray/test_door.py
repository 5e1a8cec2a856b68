"""The door of an engine replica, without a cluster: preparers walk in, and strangers keep none of them out."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import anyio
import numpy as np
import pytest
from anyio.abc import SocketStream

pytest.importorskip("ray", reason="needs the extra `ray`")

from staged_pool.ray.door import Door, open_door, walk_in
from staged_pool.ray.object_store import ObjectStore, Received
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.engine.open_front import run_front_engine
from staged_pool.runtime.remote.line import FrontLine
from staged_pool.stages.stage import StageOptions
from tests.api.http.test_accept_loop import connecting, descriptors
from tests.servers.fronts import device_engine_on, terms_of
from tests.support.model import LetterModel, expected

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("default")]  # Ray's own


async def embed_through(door: Door, client: socket.socket | None = None) -> None:
    """Walk in, embed a text, and go.

    Args:
        door: The door.
        client: A connection to it. None: a new one.
    """
    line = FrontLine(StageOptions().clock)
    async with anyio.create_task_group() as tasks:
        if client is None:
            tasks.start_soon(walk_in, line, door)
        else:
            stream = await SocketStream.from_socket(client)
            await stream.send(door.token)
            tasks.start_soon(line.run, stream, None, ObjectStore())
        with anyio.fail_after(30):
            await line.welcomed.wait()
        async with run_front_engine(EngineConfig(), LetterModel(), line) as engine:
            found = await engine.embed(["ab"], normalize=False)
        assert np.array_equal(np.asarray(found.embeddings), [expected("ab")])
        line.close()


async def test_silent_connections_beyond_the_descriptors_keep_no_preparer_out() -> None:
    config, model, desk = EngineConfig(), LetterModel(), FrontDesk()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        async with open_door(desk, "127.0.0.1", "a replica", Received()) as door:
            await embed_through(door)
            with ExitStack() as stack:
                for _ in range(100):
                    stack.enter_context(connecting(("127.0.0.1", door.port)))
                peer = connecting(("127.0.0.1", door.port))
                with descriptors(free=8):
                    await embed_through(door, peer)
            await embed_through(door)


async def test_a_wrong_token_opens_nothing() -> None:
    config, model, desk = EngineConfig(), LetterModel(), FrontDesk()
    async with device_engine_on(model, config, desk) as device:
        desk.add(device, terms_of(model, config))
        async with open_door(desk, "127.0.0.1", "a replica", Received()) as door:
            line = FrontLine(StageOptions().clock)
            with anyio.fail_after(30):
                reason = await walk_in(line, door._replace(token=bytes(len(door.token))))
            assert "the peer" in reason
            assert not line.welcomed.is_set()
