"""Workflows of the repository: their schema, their actions, their rights, and the commands that they run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.deploy.files import read_yaml
from tests.packaging.floors import ROOT

WORKFLOWS: Final = sorted((ROOT / ".github/workflows").glob("*.yml"))
PINNED: Final = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("check-jsonschema")
    command: list[str | Path] = [program, "--builtin-schema", "vendor.github-workflows", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read_yaml(path)["jobs"].values():
        yield from job.get("steps", ())


def test_there_are_two() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml", "release.yml"]


@each_workflow
def test_it_has_the_form_of_a_workflow(path: Path, tmp_path: Path) -> None:
    done = check_schema(path)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(path.read_text().replace("permissions:", "permission:", 1))
    assert check_schema(wrong).returncode == 1


@each_workflow
def test_actions_are_pinned_by_commit(path: Path) -> None:
    for used in re.findall(r"uses: (.*)", path.read_text()):
        assert used == "./.github/workflows/ci.yml" or PINNED.fullmatch(used), used


@each_workflow
def test_rights_are_the_least(path: Path) -> None:
    found = read_yaml(path)
    assert found["permissions"] == {"contents": "read"}
    rights = {name: job["permissions"] for name, job in found["jobs"].items() if "permissions" in job}
    assert rights == (
        {
            "publish-package": {"id-token": "write"},
            "publish-site": {"contents": "read", "pages": "write", "id-token": "write"},
            "publish-image": {"contents": "read", "packages": "write"},
        }
        if path.name == "release.yml"
        else {}
    )
    for step in steps(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
        assert "${{" not in step.get("run", ""), "a value becomes code there: hand it over in env"
    for name, job in found["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 120, name


def test_ci_runs_the_command_of_the_readme() -> None:
    ci, release = WORKFLOWS
    commands = [step["run"] for step in steps(ci) if "run" in step]
    assert [command.partition(" TORCH_PIP_ARGS=")[0] for command in commands] == ["make check test", "make containers"]
    assert "make check test\n" in (ROOT / ".ci/run").read_text()
    versions = read_yaml(ci)["jobs"]["test"]["strategy"]["matrix"]["python"]
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f'"Programming Language :: Python :: {version}"' in project for version in versions)
    assert read_yaml(release)["jobs"]["test"] == {"uses": "./.github/workflows/ci.yml"}


def test_nothing_is_published_before_the_tests() -> None:
    jobs = read_yaml(ROOT / ".github/workflows/release.yml")["jobs"]
    assert jobs["package"]["needs"] == "test"
    for name in ("publish-package", "publish-site", "publish-image"):
        assert jobs[name]["needs"] == "package"
        assert jobs[name]["environment"]


def test_the_image_is_built_of_the_dockerfile() -> None:
    (build,) = (
        step["with"]
        for step in steps(ROOT / ".github/workflows/release.yml")
        if step.get("uses", "").startswith("docker/build-push-action@")
    )
    dockerfile = (ROOT / build["context"] / build["file"]).read_text()
    arguments = re.findall(r"^(\w+)=", build["build-args"], re.MULTILINE)
    assert arguments == ["PYTHON_IMAGE", "TORCH_PIP_ARGS"]
    assert all(f"\nARG {name}=" in dockerfile for name in arguments)
