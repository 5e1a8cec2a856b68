"""Gateways: their configurations, the checks of answers, and short trials with real ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from perf.gateways.gateway import ADMIN_PORT, GATEWAYS, PORT, REPLICA_PORTS, Gateway, NotInstalled, Running
from perf.gateways.replicas import Replica, lasting_ports, replicas
from perf.gateways.run import model_of_replicas
from perf.gateways.trial import Plan, Vectors, run_trial
from perf.tools.known_vectors import known_vectors

CHECKS: Final = {
    "envoy": ("--mode", "validate", "--config-path"),
    "haproxy": ("-c", "-f"),
    "nginx": ("-t", "-e", "stderr", "-c"),
}
"""Arguments by which each program checks a configuration."""


@pytest.fixture(params=GATEWAYS)
def gateway(request: pytest.FixtureRequest) -> Gateway:
    return GATEWAYS[request.param]


def program_of(gateway: Gateway) -> str:
    try:
        return gateway.command(Path())[0]
    except NotInstalled as missing:
        pytest.skip(str(missing))


def two_ports() -> tuple[int, int]:
    port, other = lasting_ports(2)
    return port, other


def test_only_ports_and_folders_differ_from_the_configuration_that_is_shipped(gateway: Gateway, tmp_path: Path) -> None:
    text = gateway.configuration(Running(21, 22, tmp_path), (11, 12, 13))
    assert all(f"{port}" in text for port in (11, 12, 13, 21))
    assert not [port for port in (*REPLICA_PORTS, PORT, ADMIN_PORT) if str(port) in text]
    assert "/run/" not in text


def test_the_gateway_accepts_its_configuration(gateway: Gateway, tmp_path: Path) -> None:
    program = program_of(gateway)
    config = tmp_path / gateway.config
    config.write_text(gateway.configuration(Running(*two_ports(), tmp_path), lasting_ports(3)))
    name = next(name for name, each in GATEWAYS.items() if each is gateway)
    checked = subprocess.run([program, *CHECKS[name], config], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_missing_program_is_named_with_its_installation() -> None:
    missing = Gateway(
        name="Nothing", install="apt-get install nothing", config="", program=lambda: None,
        arguments=lambda _: [], retried=lambda _: None,
    )  # fmt: skip
    with pytest.raises(NotInstalled, match=r"^Nothing is not installed: apt-get install nothing$"):
        missing.command(Path())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Sequence[Replica], Vectors]]:
    """Three replicas, and texts with their right vectors."""
    folder = tmp_path_factory.mktemp("gateways")
    model = model_of_replicas(folder / "model")
    vectors = known_vectors(model, 300)
    assert len({np.asarray(vector).tobytes() for vector in vectors.values()}) == 300
    with ExitStack() as stack:
        yield stack.enter_context(replicas(Path(str(model.model)), folder / "replicas")), vectors


@pytest.mark.long
def test_no_request_is_lost_and_no_vector_is_wrong_while_replicas_die_drain_and_restart(
    gateway: Gateway, world: tuple[Sequence[Replica], Vectors], tmp_path: Path
) -> None:
    program_of(gateway)
    running, vectors = world
    plan = Plan(requests=500, warm_up_requests=200, overload_s=2.0)
    outcome = run_trial(gateway, running, vectors, plan, tmp_path / "gateway")
    assert [event.what for event in outcome.events] == ["kill -9", "drain", "roll", "roll", "roll"]
    assert outcome.steady.asked >= 500
    assert outcome.steady.answers == outcome.steady.asked, outcome.failures
    overload = outcome.overload
    assert overload is not None
    assert (overload.other_statuses, overload.broken, overload.timeouts) == ({}, 0, 0)
