"""The front door before a model that computes nothing: every load is measured, and the server keeps to its core."""

from __future__ import annotations

import base64
import os

import msgspec
import numpy as np
import psutil

from perf.cost.front import measure, mock_command, requests
from perf.cost.mock import WIDTH
from perf.tools.report import Target
from perf.tools.servers import serving


def test_every_load_is_answered_and_a_full_server_rejects_nearly_all() -> None:
    cells = measure("asyncio", rounds=1, seconds=0.4, clients=(1, 4), beside=4)
    assert list(cells) == ["1", "4", "4, probed", "4, full"]
    assert all(cell.rate > 0 and cell.server_s[0] > 0 for cell in cells.values())
    assert [name for name, cell in cells.items() if cell.health.latencies_ms] == ["4, probed"]
    assert [cell.rejected for cell in cells.values()][:3] == [0, 0, 0]
    assert cells["4, full"].rejected > 0.5
    assert {len(cell.row()) for cell in cells.values()} == {13}


def test_all_threads_of_the_mock_server_share_one_core() -> None:
    with serving(mock_command("asyncio")) as server:
        body = server.wait_answer(requests()[0]).body
        process = psutil.Process(server.process.pid)
        cores = [os.sched_getaffinity(thread.id) for thread in process.threads()]
    embedding = msgspec.json.decode(body)["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(embedding), np.float32).shape == (WIDTH,)
    assert len(cores) > 1
    assert set(map(frozenset, cores)) == {frozenset({min(os.sched_getaffinity(0))})}


def test_a_target_may_be_the_least_that_is_enough() -> None:
    assert [Target("rate", value, 5.0, "", at_least=True).met for value in (4.0, 5.0, 6.0)] == [False, True, True]
    assert [Target("time", value, 5.0, "").met for value in (4.0, 5.0, 6.0)] == [True, True, False]
