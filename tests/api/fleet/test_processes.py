"""A server of several processes: real fronts, a real engine process, and the supervisor over them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from staged_pool.api.commands.fleet import check_fleet
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.server import SPARE_FILES
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError
from tests.chaos import kills
from tests.models.tiny import build
from tests.servers.process import ServerProcess, serve_command
from tests.servers.tiny_models import folder

TEXTS = [f"text number {number} of the line" for number in range(40)]


def flags(*more: str) -> list[str]:
    model = (
        "--model",
        str(folder("embedder")),
        "--dtype",
        "float32",
        "--torch-threads",
        "1",
        "--preprocess-limit",
        "1",
    )
    return serve_command(*model, "--api-servers", "2", *more)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("fleet") / "log"
    with ServerProcess(flags("--backend", request.param, "--drain-lead", "0.2"), log) as running:
        running.wait_ready()
        yield running


def children(server: ServerProcess) -> dict[str, int]:
    """Return the process id of the child that has each name now."""
    return {event["child"]: event["pid"] for event in server.events if event["event"] == "process.started"}


def embed(server: ServerProcess, texts: list[str]) -> tuple[int, list[list[float]]]:
    status, body = server.ask("/v1/embeddings", {"input": texts})
    return status, [row["embedding"] for row in body["data"]] if status == 200 else []


class Load:
    """Clients that send until they are told to stop, and count the outcomes."""

    def __init__(self, server: ServerProcess, clients: int = 4) -> None:
        self._server = server
        self._right = dict(zip(TEXTS, embed(server, TEXTS)[1], strict=True))
        self._stop = threading.Event()
        self.statuses: list[int] = []
        self.lost: list[OSError] = []
        self.wrong = 0
        self.longest_s = 0.0
        self._threads = [threading.Thread(target=self._send, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), "a client waits for ever"

    def _send(self, number: int) -> None:
        place = number
        while not self._stop.is_set():
            text = TEXTS[place % len(TEXTS)]
            place += 1
            began = time.monotonic()
            try:
                status, vectors = embed(self._server, [text])
            except OSError as error:
                self.lost.append(error)
                time.sleep(0.01)  # nobody listens any more, or not yet
            else:
                self.statuses.append(status)
                if status == 200 and max(abs(a - b) for a, b in zip(vectors[0], self._right[text], strict=True)) > 1e-5:
                    self.wrong += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def answered(self) -> int:
        return self.statuses.count(200)


def test_two_fronts_answer_with_the_vectors_of_one_engine(server: ServerProcess) -> None:
    answers = [embed(server, TEXTS) for _ in range(6)]  # a connection each: several fronts take them
    assert {status for status, _ in answers} == {200}
    assert all(vectors == answers[0][1] for _, vectors in answers)


def test_reports_add_up_all_processes(server: ServerProcess) -> None:
    before = _counted(server)
    for _ in range(8):
        assert embed(server, ["a text"])[0] == 200
    server.wait_until(lambda: _counted(server) >= before + 8)
    stages = server.ask("/stages")[1]["models"]["embedder"]
    assert [stage["name"] for stage in stages["stages"]] == ["parse", "preprocess", "batch", "postprocess"]
    server.wait_until(lambda: server.ask("/stages")[1]["models"]["embedder"]["admission"]["requests"] == 0)
    up = [line for line in _metrics(server) if line.startswith("staged_pool_process_up")]
    assert sorted(up) == [
        f'staged_pool_process_up{{process="{name}"}} 1.0' for name in ("engine", "front-1", "front-2")
    ]


def test_a_front_that_is_killed_takes_only_its_own_clients_along_and_comes_back(server: ServerProcess) -> None:
    before = _counted(server)
    with Load(server) as load:
        server.wait_until(lambda: load.answered() > 20)
        killed = children(server)["front-1"]
        os.kill(killed, signal.SIGKILL)
        server.wait_until(lambda: children(server)["front-1"] != killed)
        seen = load.answered()
        server.wait_until(lambda: load.answered() > seen + 50)
    assert set(load.statuses) == {200}
    assert load.wrong == 0
    assert len(load.lost) <= 4  # a connection that was open, for each client
    server.wait_until(lambda: 'process_up{process="front-1"} 1.0' in server.ask("/metrics")[1].decode())
    assert _counted(server) > before  # the counts of the killed one stay


def test_an_engine_process_that_is_killed_fails_what_it_had_and_is_started_anew(server: ServerProcess) -> None:
    with Load(server) as load:
        server.wait_until(lambda: load.answered() > 20)
        killed = children(server)["engine"]
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        server.wait_until(lambda: 503 in load.statuses)
        assert time.monotonic() - began < 1.5
        assert server.ask("/health")[0] == 200
        server.wait_until(lambda: server.ask("/ready")[0] == 200, within_s=60)
        seen = load.answered()
        server.wait_until(lambda: load.answered() > seen + 50)
    assert set(load.statuses) == {200, 503}
    assert load.lost == []
    assert load.wrong == 0


def test_an_engine_process_that_hangs_is_not_ready_within_two_seconds(server: ServerProcess) -> None:
    engine = children(server)["engine"]
    os.kill(engine, signal.SIGSTOP)
    try:
        began, answer = time.monotonic(), server.ask("/ready")
        while answer[0] == 200 and time.monotonic() - began < 10:
            answer = server.ask("/ready")
        assert time.monotonic() - began < 2.5
        assert "has said nothing" in answer[1]["reason"]  # the other front may count its last beat a moment later
        assert server.ask("/health")[0] == 200
    finally:
        os.kill(engine, signal.SIGCONT)
    server.wait_until(lambda: server.ask("/ready")[0] == 200)


def test_sigterm_under_load_loses_no_request_and_leaves_no_process(server: ServerProcess) -> None:
    with Load(server) as load:
        server.wait_until(lambda: load.answered() > 20)
        pids = children(server).values()
        assert server.end() == 0
    assert set(load.statuses) <= {200, 503}
    refused = [error for error in load.lost if isinstance(error, ConnectionRefusedError | ConnectionResetError)]
    assert load.lost == refused
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# The server of the tests above has ended: the next ones start their own.


def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with ServerProcess(flags(), tmp_path / "log") as server:
        server.wait_ready()
        pids = list(children(server).values())
        server.process.kill()
        server.wait_until(lambda: not any(map(_runs, pids)))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_sigterm_while_the_engine_process_loads_ends_the_server_in_time_with_status_0(
    backend: str, tmp_path: Path
) -> None:
    # Importing torch is the first part of a load, and this one never ends.
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'loads')!r}, 'w')\nimport time\ntime.sleep(3600)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with ServerProcess(
        flags("--backend", backend), tmp_path / "log", environment={"PYTHONPATH": path}, preloads=None
    ) as server:
        server.wait_until((tmp_path / "loads").exists, within_s=60)
        server.wait_until(lambda: server.ask("/ready")[0] == 503, within_s=60)
        pids = children(server).values()
        assert server.end() == 0
        assert "server.ended" not in server.log, "it was ended by force"
        assert not any(map(_runs, pids))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_sigterm_while_children_are_started_ends_the_server_with_status_0(backend: str, tmp_path: Path) -> None:
    with ServerProcess(flags("--backend", backend), tmp_path / "log") as server:
        server.wait_until(lambda: bool(children(server)))  # the first of three
        assert server.end() == 0
        assert "server.ended" not in server.log, "it was ended by force"
        assert not any(map(_runs, children(server).values()))


def test_a_front_that_is_killed_in_the_drain_is_in_the_log_and_in_the_exit_status(tmp_path: Path) -> None:
    with ServerProcess(flags("--drain-lead", "60"), tmp_path / "log") as server:
        server.wait_ready()
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: "server.stopping" in server.log)
        for name in ("front-1", "front-2"):
            os.kill(children(server)[name], signal.SIGKILL)
        assert server.exit_code() == 1
        ends = {event["child"]: event["exit_code"] for event in server.events if event["event"] == "process.ended"}
        assert ends == {"front-1": -signal.SIGKILL, "front-2": -signal.SIGKILL}


IMPATIENT = """
import sys
from staged_pool.api.commands import logs
from staged_pool.api.commands.fleet import supervise
from staged_pool.api.commands.process_config import ProcessConfig
from staged_pool.api.config import ServerConfig
from staged_pool.api.http.listener import bind
from staged_pool.runtime.config import EngineConfig

logs.configure(format_="json", process="supervisor")
model = EngineConfig(model=sys.argv[1], dtype="float32", torch_threads=1, preprocess_limit=1, watchdog_s=12.0)
supervise(ProcessConfig(api_servers=2, log_format="json"), ServerConfig(port=0), [model], (), bind("127.0.0.1", 0))
"""
"""A server whose supervisor is impatient, which no flag of the command can make it."""


def test_a_freeze_that_is_longer_than_the_watchdog_kills_no_child(tmp_path: Path) -> None:
    with ServerProcess([sys.executable, "-c", IMPATIENT, str(folder("embedder"))], tmp_path / "log") as server:
        server.wait_ready()
        before = children(server)
        frozen = [server.process.pid, *before.values()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(14.0)  # all processes are stopped meanwhile
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        answers = [embed(server, TEXTS)[0] for _ in range(4)]
        time.sleep(2.0)  # the supervisor has looked twice
        assert children(server) == before
        assert answers == [200] * 4


def test_signals_to_any_process_of_a_server_kill_nothing(tmp_path: Path) -> None:
    with ServerProcess(flags(), tmp_path / "log") as server:
        server.wait_until(lambda: [event["event"] for event in server.events].count("process.ready") == 3)
        before = children(server)
        for pid in (server.process.pid, *before.values()):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        for pid in before.values():  # as from a terminal, or a manager that tells all processes of a group
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
                os.kill(pid, number)
        server.wait_until(lambda: server.log.count("most recent call first") >= 4)
        assert {embed(server, TEXTS)[0] for _ in range(6)} == {200}
        assert children(server) == before
        assert server.end() == 0


def test_children_that_are_killed_at_once_and_in_turn_leave_nobody_waiting(tmp_path: Path) -> None:
    seen = kills.Seen()
    with ServerProcess(flags(), tmp_path / "log") as server:
        server.wait_ready()
        order = ["front-1", "front-2", "front-1", "engine", "front-2", "front-1"]
        kills.kill_all_of(server, order, seen, pause_s=0.0, seconds=300.0)
        # Each front must take connections, not only one of them.
        server.wait_until(lambda: _up(server) == 3)
        assert {embed(server, TEXTS)[0] for _ in range(6)} == {200}
        assert server.end() == 0
    assert seen.late == []
    assert seen.deaf_s == []


def test_each_front_may_open_a_file_for_each_connection(tmp_path: Path) -> None:
    command = ["sh", "-c", 'ulimit -Sn 300; exec "$@"', "sh", *flags("--max-connections", "100")]
    with ServerProcess(command, tmp_path / "log", preloads=None) as server:
        server.wait_ready()
        for name in ("front-1", "front-2"):
            assert resource.prlimit(children(server)[name], resource.RLIMIT_NOFILE)[0] == 100 + SPARE_FILES
        assert server.end() == 0


def test_a_setting_that_cannot_work_ends_the_server_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with ServerProcess(
        serve_command("--model", str(tmp_path / "empty"), "--api-servers", "1"), tmp_path / "log"
    ) as server:
        assert server.exit_code() == 2
        assert "empty" in server.log


def test_a_model_that_only_its_load_finds_wrong_ends_the_server_with_one_line(tmp_path: Path) -> None:
    model = build("bge-m3", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"cut short")
    with ServerProcess(serve_command("--model", str(model), "--api-servers", "1"), tmp_path / "log") as server:
        assert server.exit_code() == 2
        assert "process.started" in server.log, "the supervisor found it"
        assert [line for line in server.log.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"quic_port": 0, "tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}, "any of the fronts"),
        ({"batch_dir": Path()}, "must own the folder"),
    ],
)
def test_settings_that_need_one_process_are_rejected(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_fleet(2, ServerConfig(**settings), [EngineConfig()])


def _up(server: ServerProcess) -> int:
    """Return how many processes run and report."""
    return sum(line.startswith("staged_pool_process_up") and line.endswith(" 1.0") for line in _metrics(server))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _metrics(server: ServerProcess) -> list[str]:
    text: bytes = server.ask("/metrics")[1]
    return text.decode().splitlines()


def _counted(server: ServerProcess) -> float:
    """Return the number of answered embedding requests, as `/metrics` has it."""
    ok = 'route="/v1/embeddings",status="200"'
    return sum(
        float(line.rpartition(" ")[2]) for line in _metrics(server) if "http_requests_total" in line and ok in line
    )
