"""Servers as processes: the readings of a visit, and leftovers after its end."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import psutil
import pytest

from perf.peers.catalogue import PEERS, Launch
from perf.peers.inputs import IMAGES, Answers, Inputs, Scenario
from perf.peers.visits import Plan, started, visit, visit_bare
from perf.tools.client import get
from perf.tools.jpegs import jpeg
from perf.tools.servers import ServerFailed, serving
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.open import open_engine
from tests.api.conftest import tiny_folder  # noqa: F401  # a fixture
from tests.models.tiny.images import clip

CLIENTS: dict[Scenario, tuple[int, ...]] = {
    "s1": (1, 2),
    "m8": (2,),
    "x64": (1,),
    "rank": (1,),
    "images": (1,),
    "photos": (1,),
    "captions": (1,),
}
SCENARIOS: tuple[Scenario, ...] = ("s1", "rank")
OURS = PEERS[0]

WITH_A_CHILD = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[3])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

REFUSING = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(422)
        self.send_header("Content-Length", "12")
        self.end_headers()
        self.wfile.write(b"what is this")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def inputs(tiny_folder: Path) -> Inputs:  # noqa: F811
    lists: dict[Scenario, list[list[str]]] = {
        "s1": [["a text"], ["another"]], "x64": [["some", "more of them"]], "rank": [["query", "one", "two"]],
    }  # fmt: skip
    return Inputs(tiny_folder, lists, {})


@pytest.fixture
def launch(inputs: Inputs, tmp_path: Path) -> Launch:
    return Launch(
        python=Path(sys.executable),
        folder=inputs.folder,
        dtype="float32",
        torch_threads=1,
        max_tokens=64,
        scratch=tmp_path,
    )


async def engine_answers(inputs: Inputs) -> Answers:
    """The answers of an engine in this process, whose libraries are there: a server takes seconds to start."""
    (texts,), ((query, *documents),) = inputs.lists["x64"], inputs.lists["rank"]
    config = EngineConfig(model=str(inputs.folder), dtype="float32", torch_threads=1)
    async with open_engine(config) as engine:
        vectors = (await engine.embed(texts)).embeddings
        return Answers(vectors, tuple((await engine.score(query, documents)).scores))


def test_a_visit_sees_every_cell_and_level_of_a_server_that_is_right(inputs: Inputs, launch: Launch) -> None:
    ours = anyio.run(engine_answers, inputs)
    plan, steps = Plan(seconds=0.3, level_seconds=0.3, clients=CLIENTS, levels=(0.5,)), list[None]()
    seen = visit(OURS, launch, inputs, SCENARIOS, plan=plan, ours=ours, seed=0, done=lambda: steps.append(None))
    assert seen.failures == {}
    assert list(seen.cells) == [("s1", 1), ("s1", 2), ("rank", 1)]
    assert all(cell.rate(scenario) > 0 and cell.health.latencies_ms for (scenario, _), cell in seen.cells.items())
    assert len(steps) == plan.steps(OURS, SCENARIOS, inputs) == 4
    assert seen.levels[0.5].outcome.accepted_ms
    assert seen.least_cosine > 0.9999
    assert seen.rss_mb >= seen.pss_mb > 0
    assert all(cell.cores.server > 0 for cell in seen.cells.values())
    assert seen.levels[0.5].cores.server > 0


@pytest.mark.long
@pytest.mark.parametrize("neighbour", [True, False])
def test_the_bare_loop_is_measured_in_every_cell(neighbour: bool, inputs: Inputs, launch: Launch) -> None:
    plan = Plan(seconds=0.2, level_seconds=0.2, clients=CLIENTS, levels=(0.5,), neighbour=neighbour)
    seen = visit_bare(launch, inputs, SCENARIOS, plan=plan)
    assert list(seen.cells) == [("s1", 1), ("s1", 2), ("rank", 1)]
    assert seen.cells["s1", 1] is not seen.cells["rank", 1]
    assert all(cell.rate(scenario) > 0 for (scenario, _), cell in seen.cells.items())
    assert not seen.levels
    assert all((cell.cores.loops > 0) == neighbour for cell in seen.cells.values())


@pytest.mark.long
def test_texts_and_images_come_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "clip"
    folder.mkdir()
    clip(folder)
    images: dict[Scenario, list[bytes]] = {"images": [jpeg("vga", 0), jpeg("vga", 1)], "photos": [jpeg("1080p", 0)]}
    inputs = Inputs(folder, {"captions": [["a photo"], ["of a cat"]]}, images)
    launch = Launch(
        python=Path(sys.executable), folder=folder, dtype="float32", torch_threads=1, max_tokens=16, scratch=tmp_path
    )
    with started(OURS, launch) as server:
        ours = inputs.answers(server, OURS.dialect)
    plan, steps = Plan(seconds=0.3, level_seconds=0.3, clients=CLIENTS, levels=(0.5,)), list[None]()
    seen = visit(OURS, launch, inputs, IMAGES, plan=plan, ours=ours, seed=0, done=lambda: steps.append(None))
    assert seen.failures == {}
    assert len(steps) == plan.steps(OURS, IMAGES, inputs) == 4
    rates = [seen.mixed[kind].offered_per_s for kind in ("captions", "images")]
    assert rates[0] / sum(rates) == pytest.approx(0.4)
    time_s = sum(rate / level.capacity_per_s for rate, level in zip(rates, seen.mixed.values(), strict=True))
    assert time_s == pytest.approx(0.8)


@pytest.mark.long
def test_the_open_loops_have_a_server_of_their_own(inputs: Inputs, launch: Launch) -> None:
    with started(OURS, launch) as server:
        ours = inputs.answers(server, OURS.dialect)
    full = replace(OURS, under_overload=("--max-requests", "1"))
    plan = Plan(seconds=0.2, level_seconds=1.0, clients={**CLIENTS, "s1": (4,)}, levels=(4.0,), neighbour=True)
    seen = visit(full, launch, inputs, ("s1",), plan=plan, ours=ours, seed=0, done=lambda: None)
    assert seen.failures == {}
    assert seen.cells["s1", 4].load.rejected == 0
    assert seen.levels[4.0].outcome.rejected_ms
    assert min(seen.cells["s1", 4].cores.loops, seen.levels[4.0].cores.loops) > 0, "the neighbour is busy"


@pytest.mark.long
def test_without_open_loops_their_server_is_not_started(inputs: Inputs, launch: Launch) -> None:
    with started(OURS, launch) as server:
        ours = inputs.answers(server, OURS.dialect)
    broken = replace(OURS, under_overload=("--no-such-option",))
    plan = Plan(seconds=0.2, level_seconds=0.2, clients=CLIENTS, levels=())
    seen = visit(broken, launch, inputs, ("s1",), plan=plan, ours=ours, seed=0, done=lambda: None)
    assert not seen.failures
    assert not seen.levels


def test_a_server_that_does_not_start_is_named_with_its_last_words(inputs: Inputs, launch: Launch) -> None:
    broken = replace(OURS, command=lambda _: [sys.executable, "-c", "raise SystemExit('no model here')"])
    ours = Answers(np.ones((2, 2), np.float32), None)
    plan = Plan(seconds=0.1, level_seconds=0.1, clients=CLIENTS, levels=())
    with pytest.raises(ServerFailed, match="no model here"):
        visit(broken, launch, inputs, SCENARIOS, plan=plan, ours=ours, seed=0, done=lambda: None)


def test_a_server_that_calls_the_request_wrong_is_not_waited_for(tmp_path: Path) -> None:
    with serving([sys.executable, "-c", REFUSING], folder=tmp_path) as server:
        with pytest.raises(ServerFailed, match="rejects the request with 422: what is this"):
            server.wait_answer(get("/"))


def test_what_a_server_has_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "child"
    with serving([sys.executable, "-c", WITH_A_CHILD, str(told)], folder=tmp_path) as server:
        server.wait_answer(get("/"))
        child = psutil.Process(int(told.read_text()))
        assert child.is_running()
    assert not child.is_running()
