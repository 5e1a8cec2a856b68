"""`python -m tests.chaos.kills`: a server of several processes whose children are killed again and again.

Clients open a connection for each request meanwhile, and a probe asks `/health` all the time. Everything is bounded,
and on 127.0.0.1. It prints what clients saw: each request must end by its deadline, and nobody may be left waiting by
fronts that are alive.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from tests.servers.process import ServerProcess, serve_command
from tests.servers.tiny_models import folder

DEADLINE_S: Final = 30.0
"""Deadline of each request of a client, in seconds."""

SLACK_S: Final = 2.0
"""Seconds for an answer to come, on a busy machine."""

DEAF_S: Final = 20.0
"""Seconds without an answer to any probe that count as a deaf spell: several fronts have started meanwhile."""

BURST: Final = 3
"""Kills one after the other, before a front is ready again."""

COMES_BACK_S: Final = 60.0
"""Seconds in which a killed child must be started again, and the server be ready."""


@dataclass
class Seen:
    """Outcomes of clients and of the probe."""

    outcomes: Counter[str] = field(default_factory=Counter)
    late: list[float] = field(default_factory=list)
    """Durations of requests that passed their deadline, in seconds."""
    longest_request_s: float = 0.0
    probes: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each probe that had an end, in seconds since 1970."""
    deaf_s: list[float] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    ready: list[tuple[float, float]] = field(default_factory=list)
    """Times from which and until which a front was ready."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, outcome: str, took_s: float) -> None:
        """Note a request of a client."""
        with self._lock:
            self.outcomes[outcome] += 1
            self.longest_request_s = max(self.longest_request_s, took_s)
            if outcome == "late" or took_s > DEADLINE_S + SLACK_S:
                self.late.append(took_s)

    def longest_beside_ready_s(self) -> float:
        """Return the longest part of a probe beside one front that was ready."""
        parts = [
            min(end, until) - max(begin, since)
            for begin, end in self.probes
            for since, until in self.ready
            if since < end and begin < until
        ]
        return max(parts, default=0.0)

    def lines(self) -> Iterator[str]:
        """Return the figures as text."""
        yield f"kills: {dict(self.kills)}"
        yield f"requests: {dict(self.outcomes)}"
        yield f"longest request: {self.longest_request_s:.2f} s of {DEADLINE_S:g} s"
        yield f"requests that passed their deadline: {len(self.late)}"
        yield f"longest wait for an accept: {max((end - begin for begin, end in self.probes), default=0.0):.2f} s"
        yield f"longest wait for an accept beside a front that was ready: {self.longest_beside_ready_s():.2f} s"
        yield f"deaf spells: {len(self.deaf_s)}"


def asked(port: int, request: bytes, timeout_s: float) -> str:
    """Send a request over a connection of its own. Returns its status, or what came instead."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as stream:
            stream.sendall(request)
            head = stream.recv(64)
    except TimeoutError:
        return "late"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "reset"
    return head.split(b" ")[1].decode() if head.startswith(b"HTTP/1.1 ") else "reset"


def embedding_of(text: str) -> bytes:
    body = json.dumps({"input": text}).encode()
    return (
        b"POST /v1/embeddings HTTP/1.1\r\nhost: test\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"x-request-timeout: %d\r\ncontent-length: %d\r\n\r\n%s" % (DEADLINE_S, len(body), body)
    )


HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"


@contextmanager
def clients(port: int, count: int, seen: Seen) -> Iterator[None]:
    """Run clients and a probe for a block."""
    stop = threading.Event()

    def ask(number: int) -> None:
        sent = 0
        while not stop.wait(0.02):
            sent += 1
            began = time.monotonic()
            outcome = asked(port, embedding_of(f"text {sent} of client {number}"), DEADLINE_S + SLACK_S)
            seen.note(outcome, time.monotonic() - began)

    def probe() -> None:
        answered_at = time.monotonic()
        while not stop.wait(0.05):
            began = time.time()
            outcome = asked(port, HEALTH, DEAF_S)
            now = time.monotonic()
            if outcome in ("late", "200"):
                seen.probes.append((began, time.time()))
            if outcome != "late":
                answered_at = now
            elif now - answered_at >= DEAF_S:
                seen.deaf_s.append(now - answered_at)
                answered_at = now

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    threads.append(threading.Thread(target=probe))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def children(server: ServerProcess) -> dict[str, int]:
    """Return the process id of the child that has each name now."""
    return {event["child"]: event["pid"] for event in server.events if event["event"] == "process.started"}


def times_ready(server: ServerProcess) -> Iterator[tuple[float, float]]:
    """Return the times from which and until which a front was ready, of the log."""
    since: dict[str, float] = {}
    for event in server.events:
        name, at = event.get("child", ""), datetime.fromisoformat(event["timestamp"]).timestamp()
        if event["event"] == "process.ready" and name.startswith("front"):
            since[name] = at
        elif event["event"] == "process.ended" and name in since:
            yield since.pop(name), at
    yield from ((at, time.time()) for at in since.values())


def kill(server: ServerProcess, name: str, seen: Seen) -> None:
    """Kill the child of a name, and wait until the next one is started; it may not serve yet."""
    killed = children(server)[name]
    os.kill(killed, signal.SIGKILL)
    seen.kills[name] += 1
    server.wait_until(lambda: children(server)[name] != killed, within_s=COMES_BACK_S)


def plan(fronts: int, engines: int, seed: int) -> list[str]:
    """Return the names of the children to kill, in the random order of a seed."""
    order = ["engine"] * engines + [f"front-{1 + number % 2}" for number in range(fronts)]
    random.Random(seed).shuffle(order)
    return order


def flags(*more: str) -> list[str]:
    """Return the command of a server with two fronts and a tiny model."""
    model = ("--model", str(folder("embedder")), "--dtype", "float32", "--torch-threads", "1")
    return serve_command(*model, "--preprocess-limit", "1", "--api-servers", "2", *more)


def kill_all_of(server: ServerProcess, order: Sequence[str], seen: Seen, *, pause_s: float, seconds: float) -> None:
    """Kill children one after the other beside clients, until the server is ready again.

    Args:
        server: The server, which is ready.
        order: Names of the children.
        seen: Gets what clients see.
        pause_s: Longest pause between two kills, in seconds.
        seconds: Kills stop after this time.
    """
    ends_at, rng = time.monotonic() + seconds, random.Random(len(order))
    with clients(server.port, 4, seen):
        for number, name in enumerate(order, 1):
            if time.monotonic() > ends_at:
                break
            kill(server, name, seen)
            time.sleep(rng.random() * pause_s)
            if not number % BURST:  # else no front would ever live on a busy machine
                server.wait_until(
                    lambda: any(until > time.time() - 1 for _, until in times_ready(server)), COMES_BACK_S
                )
        server.wait_until(lambda: server.ask("/ready")[0] == 200, within_s=COMES_BACK_S)
    seen.ready += times_ready(server)


def main(arguments: list[str] | None = None) -> int:
    """Return exit status 1 if a request was late or the end was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.kills", description=__doc__)
    parser.add_argument("--fronts", type=int, default=180, help="kills of fronts (default: %(default)s)")
    parser.add_argument("--engines", type=int, default=20, help="kills of the engine process (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=1.0, help="most seconds between kills (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=15.0, help="kills stop then (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="order of the kills (default: %(default)s)")
    options = parser.parse_args(arguments)
    seen = Seen()
    with tempfile.TemporaryDirectory() as place, ServerProcess(flags(), Path(place) / "log") as server:
        server.wait_ready()
        began = time.monotonic()
        order = plan(options.fronts, options.engines, options.seed)
        try:
            kill_all_of(server, order, seen, pause_s=options.pause, seconds=60 * options.minutes)
        finally:
            print(f"{time.monotonic() - began:.0f} s", *seen.lines(), sep="\n", flush=True)
        left = list(children(server).values())
        code = server.end()
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        print(f"final state: ready, then exit code {code}, {len(left)} processes left")
    return bool(seen.late or seen.deaf_s or code or left)


if __name__ == "__main__":
    sys.exit(main())
