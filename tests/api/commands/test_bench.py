"""`bench` and `trace` as commands: each flag, the files, the exit codes and the ends by signals."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal

from staged_pool.api.bench import level
from staged_pool.api.commands.bench import bench
from staged_pool.api.commands.trace import record, replay
from tests.api.bench.fake_server import Asked, FakeServer, answer, fake_server
from tests.servers.certificates import Certificates
from tests.servers.in_process import invoke_command
from tests.servers.on_socket import Served, serving
from tests.servers.preloaded import ROOT
from tests.servers.process import COMMAND
from tests.support.cards import BOTH_LANES, CROSS_ENCODER
from tests.support.model import LetterModel

SHORT = ("--duration", "0.1", "--rounds", "2", "--warmup", "0.05")


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """The loops of these tests are those of commands, and of servers beside them."""


@pytest.fixture(autouse=True)
def generators_are_never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no failure."""
    monkeypatch.setattr(level, "LATE_S", math.inf)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server of texts and images in a thread of its own."""
    model = LetterModel(BOTH_LANES, read_image=lambda data: f"image {data[-9:].hex()}")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(model)) as server:
        yield server


@pytest.fixture(scope="module")
def ranking() -> Iterator[Served]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(LetterModel(CROSS_ENCODER))) as server,
    ):
        yield server


def run_bench(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return invoke_command("bench", url, *SHORT, *flags)


USES: Sequence[tuple[str, ...]] = (
    ("--clients", "2", "--backend", "trio"),
    ("--rate", "60", "--burstiness", "0.3", "--slo", "5", "--seed", "4", "--encoding-format", "base64"),
    ("--rate", "60", "--tokens", "8-40", "--texts-per-request", "1-3", "--timeout", "20", "--max-connections", "50"),
    ("--sweep", "40,80", "--model", "letters", "--api-key", "any"),
    ("--images", "40x30", "--rate", "40"),
    ("--mix", "texts=0.8,images=0.2", "--images", "40x30", "--rate", "60"),
)


@pytest.mark.parametrize("flags", USES, ids=lambda flags: flags[0])
def test_a_load_is_measured(flags: tuple[str, ...], served: Served, tmp_path: Path) -> None:
    done = run_bench(served.url, *flags, "--json", str(tmp_path / "report.json"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (done.returncode, done.stderr) == (0, "")
    assert report["format"] == "staged-pool-bench"
    assert set(report["outcomes"]) == {"200"}
    assert f"server   {served.url}, model letters" in done.stdout
    assert "p99 ms" in done.stdout
    for each in report["levels"]:
        assert each["plan"] in done.stdout
        assert each["requests"]["answered"] == each["requests"]["due"] > 0
    if "--seed" in flags:
        assert report["seed"] == 4


def test_rankings_have_a_route_of_their_own(ranking: Served) -> None:
    done = run_bench(ranking.url, "--route", "rerank", "--documents", "3", "--path", "/rerank", "--rate", "40")
    assert done.returncode == 0
    assert "a query with 3 documents" in done.stdout


def test_texts_of_a_file_and_an_authority_of_ones_own(certificates: Certificates, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("first\nsecond\n")
    model = LetterModel()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving(model, certificates=certificates)) as server,
    ):
        flags = ("--file", str(tmp_path / "texts"), "--ca-file", str(certificates.roots), "--clients", "1")
        done = run_bench(server.url, *flags)
    assert done.returncode == 0, done.stderr
    assert {text for batch in model.preprocessed for text in batch} == {"first", "second"}


def test_the_knee_is_found_and_drawn(tmp_path: Path) -> None:
    def answering(asked: Asked) -> bytes:
        if asked.path != "/v1/embeddings":
            return answer(404)
        return answer(200) if len(server.asked) < 60 else answer(429)

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fake_server(answering)) as server,
    ):
        done = run_bench(
            server.url, "--sweep", "auto", "--rate", "20", "--slo", "20", "--plots", str(tmp_path / "plots")
        )
    assert done.returncode == 0
    assert re.search(r"Knee: the server keeps up with \d+ requests/s, and not with \d", done.stdout)
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"latency.svg", "goodput.svg", "timeline.svg"}


def test_failed_requests_have_an_exit_code() -> None:
    def answering(asked: Asked) -> bytes:
        return answer(500 if len(server.asked) > 10 else 200)

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fake_server(answering)) as server,
    ):
        done = run_bench(server.url, "--rate", "50", "--seed", "1")
    assert done.returncode == 1
    assert re.search(r"Failed requests, those of the warm-up included: \d+ x 500\.", done.stdout)


def test_a_generator_that_is_late_has_an_exit_code(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level, "LATE_S", -1.0)
    monkeypatch.setattr(level, "LATE_SHARE", -1.0)
    done = run_bench(served.url, "--rate", "50")
    assert done.returncode == 3
    assert "The generator is the bottleneck: it was late by " in done.stdout


WRONG: Sequence[tuple[tuple[str, ...], str]] = (
    (("--clients", "2", "--rate", "3"), "--clients is a closed loop"),
    (("--clients", "2", "--sweep", "auto"), "--clients is a closed loop"),
    (("--rate", "0"), "--rate 0: must be above 0"),
    (("--rate", "nan"), "--rate nan: must be above 0"),
    (("--rate", "0.001"), "--rate 0.001: no request comes within"),
    (("--burstiness", "2"), "--burstiness: only an open loop"),
    (("--rate", "1", "--burstiness", "0"), "--burstiness 0: must be from"),
    (("--sweep", "fast"), "--sweep 'fast': must be auto, or rates"),
    (("--sweep", "1,2", "--rate", "3"), "--rate: --sweep names its rates itself"),
    (("--duration", "0"), "--duration 0: must be a number of seconds above 0"),
    (("--warmup", "-1"), "--warmup -1: must be a number of seconds from 0"),
    (("--slo", "0"), "--slo 0: must be a number of seconds"),
    (("--timeout", "nan"), "--timeout nan: must be a number of seconds"),
    (("--tokens", "many"), "--tokens 'many': must be a number such as 64"),
    (("--texts-per-request", "0"), "--texts-per-request '0': must be a number"),
    (("--images", "big"), "--images 'big': must be width x height"),
    (("--images", "9x9", "--tokens", "5"), "--tokens: this load has only images"),
    (("--documents", "5"), "--documents: this load has only texts"),
    (("--mix", "texts=1,images=1"), "--mix 'texts=1,images=1': the shares add up to 2"),
    (("--mix", "texts=0.5,images=0.5"), "--mix has images; give their size"),
    (("--mix", "texts=1", "--route", "rerank"), "--route rerank: --mix names the kinds itself"),
    (("--mix", "texts=0.5,rerank=0.5", "--path", "/x"), "--path: this mix has two routes"),
    (("--path", "rerank"), "--path 'rerank': must be a path"),
    (("--file", "/no/such/file"), "--file '/no/such/file': cannot be read"),
    (("--file", __file__, "--tokens", "5"), "--tokens: the texts of --file have their own lengths"),
    (("--api-key", "ü"), "--api-key: must be printable ASCII"),
    (("--ca-file", __file__), "only https has certificates"),
    (("--json", "/no/such/folder/x"), "--json /no/such/folder/x: cannot be written"),
    (("--plots", "/proc/none"), "--plots /proc/none: cannot be made"),
    (("--model", "other"), "--model 'other': http"),
)


@pytest.mark.parametrize(("flags", "said"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_a_wrong_flag_is_told_before_the_load(flags: tuple[str, ...], said: str, served: Served) -> None:
    done = run_bench(served.url, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}") or f" {said}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_url_or_none_is_told() -> None:
    assert "must be an http or https address" in run_bench("host:1").stderr
    assert "Missing argument 'URL'" in invoke_command("bench").stderr


def test_a_server_that_is_not_there_is_told(free_tcp_port: int) -> None:
    done = run_bench(f"http://127.0.0.1:{free_tcp_port}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: no server answers at http://127.0.0.1:{free_tcp_port}: Connection refused;")


def test_a_signal_prints_the_numbers_so_far() -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(fake_server(lambda asked: answer())) as server,
    ):
        command = [*COMMAND, "bench", server.url, "--clients", "1", "--duration", "600", "--warmup", "0"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        _wait_asked(server, 300)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "The measurement was stopped before its end" in out
    assert "1 client(s)" in out


def _wait_asked(server: FakeServer, count: int) -> None:
    latest = time.monotonic() + 60
    while len(server.asked) < count:
        assert time.monotonic() < latest
        time.sleep(0.01)


LINE = {
    "method": "POST", "path": "/v1/embeddings", "status": 200, "items": 1, "tokens": 40, "body_bytes": 250,
    "total_ms": 1.0, "event": "request.finished", "timestamp": "2026-01-02T03:04:05Z",
}  # fmt: skip


def log_of(count: int) -> str:
    lines = [{**LINE, "timestamp": f"2026-01-02T03:04:05.{10 + place:02}0Z"} for place in range(count)]
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_trace_is_recorded_and_replayed(served: Served, tmp_path: Path) -> None:
    log, trace = tmp_path / "log", str(tmp_path / "trace")
    log.write_text(log_of(30))
    recorded = invoke_command("trace", "record", str(log), "--output", trace, "--limit", "25")
    assert recorded.returncode == 0, recorded.stderr
    assert f"written to {trace}" in recorded.stderr
    assert len(Path(trace).read_text().splitlines()) == 26
    report = tmp_path / "report.json"
    done = invoke_command(
        "trace", "replay", trace, served.url, "--speed", "2", "--limit", "20", "--json", str(report), "--slo", "9",
        "--seed", "3", "--model", "letters", "--api-key", "k", "--timeout", "9", "--max-connections", "99",
        "--encoding-format", "float", "--plots", str(tmp_path / "plots"), "--backend", "asyncio",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["outcomes"] == {"200": 20}
    assert found["inputs"] == "the sizes of the trace"
    assert found["levels"][0]["seconds"] == pytest.approx(0.095 + 0.001, abs=0.001)
    assert (tmp_path / "plots" / "timeline.svg").exists()


def test_the_standard_input_is_a_log(tmp_path: Path) -> None:
    done = invoke_command("trace", "record", "-", "-o", str(tmp_path / "trace"), stdin=log_of(3))
    assert (done.returncode, done.stderr.partition(";")[0]) == (0, "3 requests over 0.0 s")


def test_a_growing_log_is_followed_until_the_limit(tmp_path: Path) -> None:
    log, trace = tmp_path / "log", tmp_path / "trace"
    first, second = log_of(2).splitlines()
    log.write_text(first[:20])
    command = [*COMMAND, "trace", "record", str(log), "-o", str(trace), "--follow", "--limit", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    with log.open("a") as file:
        file.write(first[20:] + "\n" + second)
        file.flush()
        file.write("\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(trace.read_text().splitlines()) == 3


def test_following_ends_by_time_and_a_last_line_without_its_end_counts(tmp_path: Path) -> None:
    log, trace = tmp_path / "log", tmp_path / "trace"
    log.write_text(log_of(2).rstrip("\n"))
    flags = ("--follow", "--duration", "0.01", "-o", str(trace))
    assert invoke_command("trace", "record", str(log), *flags).returncode == 0
    assert len(trace.read_text().splitlines()) == 3
    again = invoke_command("trace", "record", str(log), *flags)
    assert (again.returncode, "exists already; give another file, or --overwrite" in again.stderr) == (2, True)
    assert invoke_command("trace", "record", str(log), "--overwrite", *flags).returncode == 0


WRONG_TRACES: Sequence[tuple[tuple[str, ...], str]] = (
    (("record", "/no/such/log", "-o", "OUT"), "LOG /no/such/log: cannot be read"),
    (("record", "-", "-o", "OUT"), "LOG -: has no request.finished line"),
    (("record", "-", "-o", "OUT", "--follow"), "--follow: the standard input is followed anyway"),
    (("record", "-", "-o", "OUT", "--duration", "1"), "--duration: only a log that is followed"),
    (("record", __file__, "-o", "OUT"), "its lines must be JSON: `staged-pool serve --log-format json`"),
    (("replay", "/no/such/trace", "http://host"), "TRACE /no/such/trace: cannot be read"),
    (("replay", "TRACE", "http://host", "--speed", "0"), "--speed 0: must be from 0.001 to 1000"),
    (("replay", "TRACE", "host"), "must be an http or https address"),
    (("replay", "TRACE", "http://host", "--ca-file", __file__), "only https has certificates"),
)


@pytest.mark.parametrize(("words", "said"), WRONG_TRACES, ids=[" ".join(words[:5]) for words, _ in WRONG_TRACES])
def test_a_wrong_use_of_traces_is_told(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log_of(2))
    trace, out = str(tmp_path / "trace"), str(tmp_path / "out")
    assert invoke_command("trace", "record", str(tmp_path / "log"), "-o", trace).returncode == 0
    done = invoke_command("trace", *({"OUT": out, "TRACE": trace}.get(word, word) for word in words))
    assert done.returncode == 2
    assert said in done.stderr
    assert not Path(out).exists()


def test_every_flag_is_used_above() -> None:
    source = Path(__file__).read_text()
    for command in (bench, record, replay):
        for param in command.params:
            if param.name not in ("help", "help_all") and param.opts[0].startswith("--"):
                assert f'"{param.opts[0]}"' in source or f'"{param.opts[-1]}"' in source, param.name
