"""One attack beside its bystanders: their latencies in calm and under attack."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection
from typing import Final

from tests.hostile.attack import Attack, Counts, Target
from tests.hostile.bystanders import Both, observing
from tests.hostile.server import AttackedServer, attacked

OVERTIME_S = 60.0
"""Seconds that an attack may take beyond its time, as it waits for answers."""

_PROCESSES: Final = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.hostile.registered"])  # then an attacker starts without imports


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack."""

    attack: Attack
    calm: Both
    under_attack: Both
    seen: Counts
    """Counts made by the attack."""
    fault: str | None
    """The exception that ended the attack; None: it went as it should."""
    resident_bytes: int
    """Resident set of the server before the attack."""
    peak_bytes: int
    alive: bool
    """The server answers afterwards."""

    def faults(self, slack_s: float) -> list[str]:
        """List the faults of an outcome.

        Args:
            slack_s: Seconds by which a machine that does other things may be late.
        """
        found = [f"it did not attack: {self.fault}"] if self.fault or not self.seen else []
        if not self.alive:
            found.append("the server answers no more")
        if self.peak_bytes > self.attack.setting.memory_limit_bytes:
            found.append(f"it took {self.peak_bytes / 1e6:.0f} MB, more than its limit")
        if not self.attack.may_lose:
            found += self.under_attack.errors
        for name in ("client", "probe"):
            calm_s, now_s = getattr(self.calm, name).p99_s, getattr(self.under_attack, name).p99_s
            if now_s > 3 * calm_s + slack_s + self.attack.work_s:
                found.append(f"{name}: p99 {now_s * 1e3:.0f} ms, {calm_s * 1e3:.0f} ms when it is calm")
        return found


def outcomes(attacks: list[Attack], seconds: float, *, calm_once: bool = False) -> Generator[Outcome, None, None]:
    """Run attacks, one after the other, each kind of server once.

    Args:
        attacks: Those of one setting stand together.
        seconds: Time of each, and of the calm before it.
        calm_once: Measure the calm before the first attack on each server only.
    """
    for setting, group in groupby(attacks, key=lambda each: each.setting):
        with attacked(setting) as server:
            _calm(server, 1.0)  # the first batches are slow
            calm = None
            for attack in group:
                if calm is None or not calm_once:
                    calm = _calm(server, seconds)
                yield _outcome(attack, server, seconds, calm)


def _calm(server: AttackedServer, seconds: float) -> Both:
    with observing(server) as calm:
        time.sleep(seconds)
    return calm


def _outcome(attack: Attack, server: AttackedServer, seconds: float, calm: Both) -> Outcome:
    resident = server.resident_bytes
    server.forget_peak()
    target = Target(server.port, seconds, server.quic_port)
    with _attacker(attack) as told:
        with observing(server) as under_attack:
            told.send(target)
            try:
                seen, fault = told.recv() if told.poll(seconds + OVERTIME_S) else ({}, "it does not end")
            except EOFError:
                seen, fault = {}, "its process ended"
    afterwards = _calm(server, 0.2)
    return Outcome(
        attack=attack,
        calm=calm,
        under_attack=under_attack,
        seen=seen,
        fault=fault,
        resident_bytes=resident,
        peak_bytes=server.peak_bytes,
        alive=server.process.poll() is None and not afterwards.errors,
    )


@contextmanager
def _attacker(attack: Attack) -> Iterator[Connection]:
    """Start the process of an attack: it receives its target, attacks, and sends its observations.

    It has started before the block begins, because the cost of its start is no part of the attack.
    """
    ours, theirs = multiprocessing.Pipe()
    process = _PROCESSES.Process(target=_attack, args=(attack, theirs))
    process.start()
    theirs.close()
    with ours:
        try:
            ours.recv()
            yield ours
        finally:
            process.kill()
            process.join()


def _attack(attack: Attack, told: Connection) -> None:
    attack.prepare()
    os.nice(19)  # it has the cores that server and bystanders leave: an attacker has a machine of its own
    told.send("ready")
    target = told.recv()
    try:
        told.send((dict(attack.run(replace(target, unix_time_s=time.time()))), None))  # its time begins here
    except Exception as error:  # noqa: BLE001  # it is told, and fails the attack
        told.send(({}, f"{type(error).__name__}: {error}"))
