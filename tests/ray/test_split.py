"""The split form: preparers before engine replicas, which come, go and are killed."""

from __future__ import annotations

import http.client
import json
import socket
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("ray", reason="needs the extra `ray`")

from perf.tools.checked_load import CheckedLoad, Counts
from perf.tools.jpegs import jpeg
from perf.under_load.ray_split import SIDE, large_image_model
from staged_pool import Image, Pool
from staged_pool.api.config import ServerConfig
from staged_pool.ray import app
from staged_pool.ray.split import ENGINE, PREPARER
from staged_pool.runtime.config import EngineConfig

if TYPE_CHECKING:
    from perf.tools.ray_cluster import ServeCluster

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
CLIENTS = 6
PIXEL_BYTES = 3 * SIDE * SIDE
SHARE: dict[str, Any] = {"ray_actor_options": {"num_cpus": 0.5}}
LONG = "word " * 18

Vectors = Mapping[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A tiny model of images whose pixels are too large for a frame."""
    return large_image_model(tmp_path_factory.mktemp("models") / "images")


@pytest.fixture(scope="module")
def served(cluster: ServeCluster, model: EngineConfig, images: EngineConfig) -> ServeCluster:
    """Two preparers before two engine replicas, with a target delay of 0.5 s."""
    models = [
        {"model": model.model, "served-name": "tiny", "target-delay": 0.5},
        {"model": images.model, "served-name": "images"},
    ]
    settings = {"models": models, "dtype": "float32", "torch-threads": 1, "coalesce": False}
    cluster.deploy(app(settings, preparers={"num_replicas": 2, **SHARE}, num_replicas=2, **SHARE))
    return cluster


def ask(cluster: ServeCluster, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)
    method, text = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection.request(method, path, text, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def reports() -> list[dict[str, Any]]:
    """Return what each engine replica does; empty while Serve takes all of them for dead."""
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        found = serve.get_deployment_handle(ENGINE, "default").broadcast("report").results(return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    return [each for each in found if isinstance(each, dict)]


def _is_gone(cluster: ServeCluster, pid: int) -> bool:
    return pid not in cluster.pids(ENGINE)


def assert_none_failed(counts: Counts) -> None:
    assert (counts.wrong, dict(counts.failed)) == (0, {})
    assert counts.answers


def test_images_have_the_vectors_of_one_process_and_go_through_the_object_store(
    served: ServeCluster, images: EngineConfig
) -> None:
    files = [jpeg("vga", seed) for seed in range(6)]
    with Pool(images) as pool:
        expected = pool.embed([Image(file) for file in files]).embeddings
    before = sum(each["stored_blocks"] for each in reports())
    inputs = [f"data:image/jpeg;base64,{b64encode(file).decode()}" for file in files]
    status, answer = ask(served, "/v1/embeddings", {"model": "images", "input": inputs, "modality": "image"})
    assert status == 200, answer
    assert np.allclose([row["embedding"] for row in answer["data"]], expected, atol=2e-4)
    after = reports()
    assert sum(each["stored_blocks"] for each in after) == before + len(files)
    assert sum(each["stored_bytes"] for each in after) >= len(files) * PIXEL_BYTES


def test_texts_have_the_vectors_of_one_process_and_use_both_engines(served: ServeCluster, vectors: Vectors) -> None:
    before = {each["replica"]: each["items"] for each in reports()}
    with CheckedLoad(served.port, vectors, model="tiny", clients=CLIENTS) as load:
        served.wait(lambda: load.counts.answers > 100)
    assert_none_failed(load.counts)
    assert len(before) == 2
    assert all(each["items"] > before[each["replica"]] for each in reports())


def test_overload_is_answered_429_with_retry_after(served: ServeCluster, vectors: Vectors) -> None:
    with CheckedLoad(served.port, vectors, model="tiny", clients=24, texts=100) as load:
        served.wait(lambda: (counts := load.counts).answers > 0 < counts.rejected)
    assert (load.counts.wrong, dict(load.counts.failed)) == (0, {})


def test_a_client_that_leaves_cancels_its_request_in_the_engine(served: ServeCluster) -> None:
    body = json.dumps({"model": "tiny", "input": [f"{number} {LONG}" for number in range(1000)]})
    connection = http.client.HTTPConnection("127.0.0.1", served.port)
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    served.wait(lambda: sum(each["requests"] for each in reports()) == 1, 30)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    served.wait(lambda: sum(each["requests"] for each in reports()) == 0, 30)

    def cancelled() -> bool:  # in one of the preparers
        models = ask(served, "/stages")[1]["models"]
        return bool(sum(models["tiny"]["cancelled"].values()) == 1)

    served.wait(cancelled, 30)


def test_a_killed_engine_costs_no_request_while_there_is_another_one(served: ServeCluster, vectors: Vectors) -> None:
    with CheckedLoad(served.port, vectors, model="tiny", clients=CLIENTS) as load:
        served.wait(lambda: load.counts.answers > 50)
        killed = served.kill_replica(ENGINE)
        served.wait(lambda: killed not in (pids := served.pids(ENGINE)) and len(pids) == served.running(ENGINE) == 2)
        served.wait(lambda: all(each["items"] for each in reports()))  # the new one has its lines
    assert_none_failed(load.counts)


def test_without_any_engine_requests_are_answered_503_until_there_is_one(
    served: ServeCluster, vectors: Vectors
) -> None:
    with CheckedLoad(served.port, vectors, model="tiny", clients=CLIENTS, rate=20) as load:
        served.wait(lambda: load.counts.answers > 20)
        for _ in range(2):
            killed = served.kill_replica(ENGINE)
            served.wait(partial(_is_gone, served, killed))
        served.wait(lambda: load.counts.failed["503"] > 0)
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        connection.request(
            "POST", "/v1/embeddings", '{"model": "tiny", "input": "a"}', {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        assert (answer.status, answer.headers["retry-after"] is not None) in ((503, True), (200, False))
        connection.close()
        served.wait(lambda: served.running(ENGINE) == 2 and len(reports()) == 2)
        answers = load.counts.answers
        served.wait(lambda: load.counts.answers > answers + 50)
    assert load.counts.wrong == 0
    assert set(load.counts.failed) == {"503"}


def test_a_killed_preparer_costs_its_requests_in_flight(served: ServeCluster, vectors: Vectors) -> None:
    with CheckedLoad(served.port, vectors, model="tiny", clients=CLIENTS) as load:
        served.wait(lambda: load.counts.answers > 50)
        killed = served.kill_replica(PREPARER)
        served.wait(
            lambda: killed not in (pids := served.pids(PREPARER)) and len(pids) == served.running(PREPARER) == 2
        )
        answers = load.counts.answers
        served.wait(lambda: load.counts.answers > answers + 50)
    assert load.counts.wrong == 0
    assert sum(load.counts.failed.values()) <= CLIENTS
    assert sum(each["requests"] for each in reports()) == 0


def test_a_rolling_update_fails_no_request(
    served: ServeCluster, model: EngineConfig, images: EngineConfig, vectors: Vectors
) -> None:
    old = {*served.pids(ENGINE), *served.pids(PREPARER)}
    new = app(
        [model, images],
        server=ServerConfig(log_clients=True),
        preparers={"num_replicas": 2, **SHARE},
        num_replicas=2,
        **SHARE,
    )
    with CheckedLoad(served.port, vectors, model="tiny", clients=CLIENTS) as load:
        served.deploy(new)
        served.wait(lambda: not old & {*served.pids(ENGINE), *served.pids(PREPARER)})
    assert_none_failed(load.counts)


def test_a_connection_without_the_token_gets_nothing(served: ServeCluster) -> None:
    from ray import serve

    [door, *_] = serve.get_deployment_handle(ENGINE, "default").broadcast("door").results()
    with socket.create_connection((door[1], door[2]), timeout=30) as connection:
        connection.sendall(bytes(len(door[3])))
        assert connection.recv(1) == b""


def test_preparers_load_neither_weights_nor_torch(served: ServeCluster, model: EngineConfig) -> None:
    """A preparer of texts: the engine replica alone maps torch."""
    served.deploy(app(model, preparers={"num_replicas": 1, **SHARE}, **SHARE), "/")
    [preparer], [engine] = served.pids(PREPARER), served.pids(ENGINE)
    assert "libtorch" not in Path(f"/proc/{preparer}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
