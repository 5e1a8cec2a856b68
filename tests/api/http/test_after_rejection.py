"""A connection after a rejection: it stays open for the next request, wherever the body was at that time."""

from __future__ import annotations

import anyio
import pytest

from staged_pool.api.http.connections import Connection
from staged_pool.runtime.admission import controller
from staged_pool.runtime.config import EngineConfig
from tests.servers.byte_client import EMBED, post, read_answer, statuses
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

HEAD_TIMEOUT_S = 0.05
LARGE = post(b'{"input":["%s"]}' % b'","'.join([b"abcdefgh"] * 4000))


@pytest.mark.parametrize("request_", [EMBED, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("part", [1.0, 0.5, 0.0], ids=["whole", "half", "head"])
@pytest.mark.parametrize("receives", [True, False], ids=["received", "early"])
async def test_the_client_may_send_its_next_request_much_later(
    request_: bytes, part: float, receives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It heeds `Retry-After`, which is longer than the time for a head."""
    if not receives:  # the first bytes of a connection arrive before its task waits for them
        monkeypatch.setattr(Connection, "_answer_on_arrival", lambda self, data: False)
    monkeypatch.setattr(controller, "EXPECTED_S", 60.0)  # after one rejection, the door rejects before the engine
    gate, config = Gate(), EngineConfig(max_requests=1)
    async with serving(LetterModel(on_forward=gate), engine=config, head_timeout_s=HEAD_TIMEOUT_S) as served:
        head = request_.index(b"\r\n\r\n") + 4
        cut = head + int(part * (len(request_) - head))
        async with await served.connect() as busy:
            await busy.send(EMBED)
            await gate.arrived()
            async with await served.connect() as other:
                await other.send(EMBED)
                assert statuses(await read_answer(other)) == [429]
            async with await served.connect() as stream:  # from here on, the server waits for its head
                await stream.send(request_[:cut])
                if cut < len(request_):
                    await stream.send(request_[cut:])
                assert statuses(await read_answer(stream)) == [429]
                await anyio.sleep(3 * HEAD_TIMEOUT_S)
                gate.open()
                assert statuses(await read_answer(busy)) == [200]
                await stream.send(EMBED)
                assert statuses(await read_answer(stream)) == [200]
