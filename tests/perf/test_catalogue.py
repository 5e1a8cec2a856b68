"""Every compared server has an environment of named versions, and needs nothing of ours."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from perf.peers.catalogue import PEERS, SERVICES, Launch, Peer, chosen
from perf.peers.environments import OURS, PINS
from perf.peers.inputs import SCENARIOS, some_of

LAUNCH = Launch(
    python=Path("/environment/bin/python"),
    folder=Path("/model"),
    dtype="float32",
    torch_threads=2,
    max_tokens=256,
    scratch=Path("/scratch"),
)
PINNED = [peer for peer in PEERS if peer.environment not in {None, OURS}]


@pytest.mark.parametrize("peer", PINNED, ids=lambda peer: peer.name)
def test_every_version_of_an_environment_is_named(peer: Peer) -> None:
    lines = (PINS / f"{peer.environment}.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", pin)] == []
    names = {pin.partition("==")[0].lower().replace("_", "-") for pin in pins}
    assert {"torch", peer.package} <= names


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_server_listens_where_only_this_machine_reaches_it(peer: Peer) -> None:
    command = peer.command(LAUNCH)
    program = next((part for part in command if part.endswith(".py")), None)
    said = " ".join([*command, *peer.variables.values(), Path(program).read_text() if program else ""])
    assert "0.0.0.0" not in said
    assert "127.0.0.1" in said or peer.name == OURS


@pytest.mark.parametrize("program", sorted(SERVICES.glob("serve_*.py")), ids=lambda path: path.stem)
def test_a_program_of_another_server_imports_nothing_of_ours(program: Path) -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert not {name for name in imported if name.split(".")[0] in {"perf", "staged_pool", "tests"}}


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_a_server_takes_a_dtype_that_it_can_compute_with(peer: Peer) -> None:
    assert peer.dtype("float32") == "float32"
    assert peer.dtype("bfloat16") in peer.dtypes


def test_ours_is_always_among_the_chosen() -> None:
    assert [peer.name for peer in chosen("ray, mosec")] == [OURS, "mosec", "ray"]
    assert chosen(None) == PEERS


def test_part_of_the_scenarios_can_be_asked_in_their_order() -> None:
    assert some_of("photos, s1") == ("s1", "photos")
    assert some_of(None) == tuple(SCENARIOS)
    with pytest.raises(ValueError, match=r"'s2' is none of the scenarios: s1, m8"):
        some_of("s1,s2")


def test_a_name_that_is_no_server_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"'tei' is none of the servers: staged-pool, infinity"):
        chosen("mosec,tei")
