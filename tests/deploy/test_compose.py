"""Compose file: its schema, its limits, and the flags and variables of its service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.files import (
    DEPLOY,
    SECONDS_AFTER_DRAIN,
    read_yaml,
    seconds,
    settings_of,
    size_bytes,
    variables_of_settings,
)

COMPOSE: Final = DEPLOY / "compose.yaml"
DOCKERFILE: Final = (DEPLOY / "Dockerfile").read_text()


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """Check a compose file against the schema of the Compose specification, which the tool brings."""
    program = Path(sys.executable).with_name("check-jsonschema")
    command: list[str | Path] = [program, "--builtin-schema", "vendor.compose-spec", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    found: dict[str, Any] = read_yaml(COMPOSE)["services"]["staged-pool"]
    return found


def test_it_has_the_form_of_the_compose_specification(tmp_path: Path) -> None:
    done = check_schema(COMPOSE)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text().replace("stop_grace_period:", "stop_grace_periods:"))
    assert check_schema(wrong).returncode == 1


def test_the_server_has_no_rights_and_writes_into_its_volume_alone(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [each.partition(":")[0] for each in service["tmpfs"]] == ["/tmp"]
    (volume,) = service["volumes"]
    assert f"\nVOLUME {volume.partition(':')[2]}\n" in DOCKERFILE
    assert volume.partition(":")[0] in read_yaml(COMPOSE)["volumes"]


def test_flags_and_variables_are_those_of_the_server(service: dict[str, Any]) -> None:
    (entrypoint,) = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    settings = settings_of([*json.loads(entrypoint), *service["command"]])
    assert seconds(service["stop_grace_period"]) >= settings.drain_s + SECONDS_AFTER_DRAIN
    assert size_bytes(settings["memory-limit"]) < size_bytes(service["mem_limit"])
    ours = {name for name in service["environment"] if name.startswith("STAGED_POOL_")}
    assert ours <= variables_of_settings()
    assert service["ports"] == [f"127.0.0.1:{settings['port']}:{settings['port']}"]


def test_the_build_has_arguments_of_the_dockerfile(service: dict[str, Any]) -> None:
    build = service["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")
    assert set(build["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
