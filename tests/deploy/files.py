"""Files of `deploy/`, and the product's own reading of the settings in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import yaml

from tests.packaging.floors import ROOT
from tests.servers.in_process import invoke_command

DEPLOY: Final = ROOT / "deploy"
CHART: Final = DEPLOY / "helm/staged-pool"
SECONDS_AFTER_DRAIN: Final = 5
"""Seconds between the end of a drain and the kill, as docs/deploy.md asks for."""

_BYTES: Final = re.compile(r"(\d+)([kMG]i?)?[bB]?", re.IGNORECASE)


class Settings(dict[str, Any]):
    """Values by key of the configuration file, as `staged-pool config` prints them."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__((key, each["value"]) for key, each in found["settings"].items())
        self.given: Final = {key for key, each in found["settings"].items() if each["source"] != "default"}
        self.models: Final = [{key: each["value"] for key, each in model.items()} for model in found["models"]]

    @property
    def drain_s(self) -> float:
        """Seconds from SIGTERM to the end of the drain."""
        return float(self["drain-lead"] + self["drain-timeout"])


def settings_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of a command that serves; `staged-pool config` checks each flag, variable and value.

    Args:
        command: Its words, which begin with `staged-pool serve`.
        environment: Variables beside those of this process.
    """
    assert [Path(command[0]).name, command[1]] == ["staged-pool", "serve"]
    with patch.dict(os.environ, environment or {}):
        done = invoke_command("config", "--json", *command[2:])
    assert done.returncode == 0, done.stderr
    return Settings(json.loads(done.stdout))


def variables_of_settings() -> set[str]:
    """Return the names of all variables that `staged-pool serve` reads."""
    from staged_pool.api.commands.serve import serve

    return {param.envvar for param in serve.params if isinstance(param.envvar, str)}


def read_yaml(path: Path) -> Any:
    """Read a file of one document."""
    return yaml.safe_load(path.read_text())


def seconds(text: str | int) -> float:
    """Read seconds as compose and systemd write them: `35s`, `2min` or `35`."""
    found = re.fullmatch(r"(\d+)(s|min|m)?", str(text))
    assert found, text
    return int(found[1]) * (60 if found[2] in ("min", "m") else 1)


def size_bytes(text: str) -> int:
    """Read bytes as compose and the server write them: compose's `4g` is 4 * 2^30, the server's `4G` is 4 * 10^9."""
    found = _BYTES.fullmatch(text)
    assert found, text
    unit = found[2] or ""
    base = 1024 if unit.islower() or unit.endswith("i") else 1000
    return int(found[1]) * int(base ** " KMG".index(unit[:1].upper() or " "))
