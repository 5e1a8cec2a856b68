"""Variables that look like settings: a misspelt one is named, with the one that was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from staged_pool.api.commands.cli import main
from staged_pool.api.commands.variables import Unknown, unknown_variables, variables_of
from tests.servers.in_process import invoke_command
from tests.servers.process import ServerProcess, serve_command

KNOWN = variables_of(main)


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """These tests have no event loop, and wait for processes."""


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("STAGED_POOL_DTPYE", "STAGED_POOL_DTYPE"),
        ("STAGED_POOL_PREPROCES_LIMIT", "STAGED_POOL_PREPROCESS_LIMIT"),
        ("STAGED_POOL_MAX_BATCH_TOKEN", "STAGED_POOL_MAX_BATCH_TOKENS"),
        ("STAGED_POOL_CANDIDATE_LABEL", "STAGED_POOL_CANDIDATE_LABELS"),  # of another command than `serve`
        ("STAGED_POOL_SOMETHING_QUITE_DIFFERENT", None),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(given: str, meant: str | None) -> None:
    assert list(unknown_variables([given, "PATH", "STAGED_POOL_MODEL"], KNOWN)) == [Unknown(given, meant)]


def test_variables_of_commands_are_known() -> None:
    names = ("CONFIG", "DTYPE", "MODEL", "API_KEY", "DIMENSIONS", "CANDIDATE_LABELS", "HYPOTHESIS_TEMPLATE", "TASK")
    assert {f"STAGED_POOL_{name}" for name in names} <= KNOWN


@pytest.mark.parametrize(
    "link",
    [
        "STAGED_POOL_SERVICE_HOST",
        "STAGED_POOL_SERVICE_PORT",
        "STAGED_POOL_SERVICE_PORT_HTTP",
        "STAGED_POOL_WEB_PORT",
        "STAGED_POOL_PORT_8000_TCP",
        "STAGED_POOL_PORT_8000_TCP_ADDR",
        "STAGED_POOL_QUIC_PORT_443_UDP_PROTO",
    ],
)
def test_what_kubernetes_sets_in_a_pod_is_no_misspelling(link: str) -> None:
    assert not list(unknown_variables([link], KNOWN))


def test_a_long_name_is_shortened() -> None:
    (found,) = unknown_variables(["STAGED_POOL_" + "X" * 10_000], KNOWN)
    assert len(found.name) == 40


def test_a_command_writes_a_line_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGED_POOL_DTPYE", "bfloat16")
    shown = invoke_command("config")
    assert shown.returncode == 0
    assert (
        "Warning: the variable STAGED_POOL_DTPYE is no setting, and is ignored; did you mean STAGED_POOL_DTYPE?\n"
        in shown.stderr
    )


@pytest.mark.parametrize("fronts", [(), ("--api-servers", "1")])
def test_a_server_logs_a_warning_and_writes_nothing_else(
    fronts: tuple[str, ...], tmp_path: Path, tiny_folder: Path
) -> None:
    command = serve_command("--model", str(tiny_folder), "--log-format", "json", *fronts)
    environment = {"STAGED_POOL_DTPYE": "secret"}
    with ServerProcess(command, tmp_path / "log", environment=environment) as server:
        server.wait_ready()
        server.end()
        events = [json.loads(line) for line in server.log.splitlines()]
    (found,) = [event for event in events if event["event"] == "settings.unknown_variable"]
    assert (found["variable"], found["meant"]) == ("STAGED_POOL_DTPYE", "STAGED_POOL_DTYPE")
    assert "secret" not in server.log
