"""Alerts in deploy/: promtool reads them, and each fires where it should and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.packaging.floors import ROOT

FOLDER = ROOT / "deploy" / "helm" / "staged-pool"
PROMTOOL = shutil.which("promtool")

needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool")


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@needs_promtool
def test_the_rules_are_valid() -> None:
    checked = promtool("check", "rules", "alerts.yml")
    assert checked.returncode == 0, checked.stderr


@needs_promtool
def test_each_alert_fires_where_it_should() -> None:
    tested = promtool("test", "rules", "alerts_test.yml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_a_wrong_expectation_fails(tmp_path: Path) -> None:
    """Guard of the test above."""
    shutil.copytree(FOLDER, tmp_path / "copy")
    cases = tmp_path / "copy" / "alerts_test.yml"
    cases.write_text(cases.read_text().replace('values: "0x60"', 'values: "1x60"', 1))
    assert promtool("test", "rules", "alerts_test.yml", folder=cases.parent).returncode == 1


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    alerts = re.findall(r"alert: (\w+)", (FOLDER / "alerts.yml").read_text())
    cases = (FOLDER / "alerts_test.yml").read_text().split("  - interval:")
    assert len(alerts) >= 8
    for alert in alerts:
        own = [case for case in cases if f"alertname: {alert}\n" in case]
        assert sorted("exp_alerts: []" in case for case in own) == [False, True], alert


def test_the_alerts_name_metrics_that_exist() -> None:
    named = set(re.findall(r"\bstaged_pool_\w+", (FOLDER / "alerts.yml").read_text()))
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert named
    assert not [name for name in named if f"`{re.sub('_bucket$', '', name)}`" not in page]
