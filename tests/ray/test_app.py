"""A replica behind Serve's proxy answers as the server does: `RAY_SERVE_ENABLE_HA_PROXY=1` takes HAProxy for it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("ray", reason="needs the extra `ray`")

from perf.tools.checked_load import CheckedLoad
from staged_pool.ray import app
from staged_pool.runtime.config import EngineConfig

if TYPE_CHECKING:
    from perf.tools.ray_cluster import ServeCluster

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
PREFIX = "/pool"
LONG = "word " * 18


class Reply(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


@pytest.fixture(scope="module")
def served(cluster: ServeCluster, model: EngineConfig) -> ServeCluster:
    """One replica, below a prefix, which rejects what would wait for more than 0.3 s."""
    config = {"model": model.model, "served-name": "tiny", "dtype": "float32", "target-delay": 0.3, "coalesce": False}
    cluster.deploy(app(config, num_replicas=1), PREFIX)
    return cluster


def ask(cluster: ServeCluster, method: str, path: str, body: Any = None, **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)
    text = None if body is None else json.dumps(body)
    names = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request(method, PREFIX + path, text, names)
    answer = connection.getresponse()
    reply = Reply(answer.status, answer.headers, answer.read())
    connection.close()
    return reply


def test_an_answer_has_its_vector_and_one_request_id(
    served: ServeCluster, vectors: Mapping[str, NDArray[np.float32]]
) -> None:
    text, vector = next(iter(vectors.items()))
    reply = ask(served, "POST", "/v1/embeddings", {"input": text}, x_request_id="mine")
    assert reply.status == 200
    assert np.allclose(json.loads(reply.body)["data"][0]["embedding"], vector, atol=2e-4)
    assert reply.headers.get_all("x-request-id") == ["mine"]
    assert "device;dur=" in reply.headers["server-timing"]


def test_a_deadline_ends_a_request_in_the_replica(served: ServeCluster) -> None:
    before = _ended(served, "expired")
    reply = ask(served, "POST", "/v1/embeddings", {"input": LONG}, x_request_timeout="0.0001")
    assert reply.status == 504
    assert _ended(served, "expired") == before + 1


def test_overload_is_answered_429_with_retry_after(
    served: ServeCluster, vectors: Mapping[str, NDArray[np.float32]]
) -> None:
    with CheckedLoad(served.port, vectors, clients=24, texts=100, prefix=PREFIX) as load:
        time.sleep(5)
    counts = load.counts
    assert counts.answers > 0 < counts.rejected
    assert (counts.wrong, dict(counts.failed)) == (0, {})


def test_a_client_that_leaves_cancels_its_request_in_the_replica(served: ServeCluster) -> None:
    before = _ended(served, "cancelled")
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    body = json.dumps({"input": [f"{number} {LONG}" for number in range(2000)]})
    connection.request("POST", PREFIX + "/v1/embeddings", body, {"content-type": "application/json"})
    served.wait(lambda: json.loads(ask(served, "GET", "/load").body)["server_load"] > 0, 30)
    connection.close()
    served.wait(lambda: _ended(served, "cancelled") == before + 1, 30)


def _ended(cluster: ServeCluster, how: str) -> int:
    """Count of requests that were cancelled or have expired in the only replica."""
    statistics = json.loads(ask(cluster, "GET", "/stages").body)
    return sum(statistics["models"]["tiny"][how].values())
