"""The Makefile describes each of its targets, and pre-commit runs the commands of `make check`."""

from __future__ import annotations

import re
import subprocess

from tests.packaging.floors import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
PRE_COMMIT = (ROOT / ".pre-commit-config.yaml").read_text()


def phony() -> list[str]:
    return [target for line in re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE) for target in line.split()]


def test_make_prints_every_target() -> None:
    run = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=2) for line in run.stdout.splitlines()]
    assert [target for _, target, _ in lines] == phony()
    assert all(len(line) <= 120 for line in run.stdout.splitlines())


def test_pre_commit_runs_what_make_check_runs() -> None:
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    assert re.findall(r"entry: (.*)", PRE_COMMIT) == commands
