"""Dockerfile: its lint, its instructions, its build context, and its health check against a real server.

No image is built: that needs a container engine.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import dockerfile_parse
import pytest

from staged_pool.api.config import ServerConfig
from tests.deploy.files import CHART, DEPLOY, read_yaml, settings_of
from tests.models.tiny import build
from tests.packaging.floors import ROOT
from tests.servers.process import ServerProcess, serve_command

DOCKERFILE: Final = DEPLOY / "Dockerfile"
HADOLINT: Final = Path(sys.executable).with_name("hadolint")
needs_hadolint = pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint is for Linux on x86-64 alone")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[str, str]]]:
    """Instructions and their values, by stage of the build; the arguments before the first stage are left out."""
    copy = tmp_path_factory.mktemp("docker") / "Dockerfile"  # the parser opens its file for writing
    shutil.copy(DOCKERFILE, copy)
    structure: list[dict[str, Any]] = dockerfile_parse.DockerfileParser(str(copy)).structure
    found: list[list[tuple[str, str]]] = []
    for line in structure:
        if line["instruction"] == "FROM":
            found.append([])
        if found and line["instruction"] != "COMMENT":
            found[-1].append((line["instruction"], line["value"]))
    return found


def values(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def environment(stage: list[tuple[str, str]]) -> dict[str, str]:
    return dict(word.split("=", 1) for value in values(stage, "ENV") for word in shlex.split(value))


def health_check(stage: list[tuple[str, str]]) -> list[str]:
    (value,) = values(stage, "HEALTHCHECK")
    command: list[str] = json.loads(value.partition("CMD ")[2])
    return command


@needs_hadolint
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_hadolint
def test_hadolint_would_find_something(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text(DOCKERFILE.read_text().replace("-slim-trixie", "").replace("USER 10001:10001", "USER root"))
    done = subprocess.run([HADOLINT, "--no-color", worse], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DL3002" in done.stdout


def test_the_base_is_a_version_of_python_that_the_package_is_for(stages: list[list[tuple[str, str]]]) -> None:
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    found = re.fullmatch(r"python:(3\.\d+)-slim-\w+", base)
    assert found, base
    assert f'"Programming Language :: Python :: {found[1]}"' in (ROOT / "pyproject.toml").read_text()
    assert [values(stage, "FROM") for stage in stages] == [["${PYTHON_IMAGE} AS build"], ["${PYTHON_IMAGE}"]]


def test_torch_comes_first_and_no_model_comes_at_all(stages: list[list[tuple[str, str]]]) -> None:
    build_stage, final = stages
    _, torch, server, package = values(build_stage, "RUN")
    own, _, of_an_index = torch.partition("else")
    assert own.startswith('if [ -z "${TORCH_PIP_ARGS}" ]; then')
    assert "pip install --require-hashes -r hashes/torch.txt" in own
    assert of_an_index.index("--no-deps -r torch.txt") < of_an_index.index("torch setuptools")
    assert of_an_index.count("pip install -c constraints.txt") == 2
    assert server == "pip install --require-hashes -r hashes/server.txt"
    assert "pip install --no-deps --no-build-isolation . " in package
    instructions = "\n".join(value for stage in stages for _, value in stage)
    assert "minilm" not in instructions.lower()
    assert not re.search(r"\b(curl|wget|apt-get)\b", instructions)
    assert not [value for stage in stages for value in values(stage, "ADD")]
    assert values(final, "COPY") == ["--from=build /opt/staged-pool /opt/staged-pool"]


def test_the_server_has_no_rights_and_writes_into_its_volume_alone(stages: list[list[tuple[str, str]]]) -> None:
    final = stages[-1]
    assert values(final, "USER") == ["10001:10001"]
    assert values(final, "VOLUME") == ["/cache"]
    assert values(final, "WORKDIR") == ["/cache"]
    (user,) = values(final, "RUN")
    assert "--uid 10001" in user
    found = environment(final)
    assert found["HF_HOME"].startswith("/cache/")
    assert found["XDG_CACHE_HOME"] == "/cache"
    assert found["PYTHONDONTWRITEBYTECODE"] == "1"
    assert found["PATH"].startswith("/opt/staged-pool/bin:")


def test_the_entrypoint_is_a_command_of_ours(stages: list[list[tuple[str, str]]]) -> None:
    final = stages[-1]
    (entrypoint,) = values(final, "ENTRYPOINT")
    settings = settings_of(json.loads(entrypoint))
    assert settings.given == {"host"}
    assert settings["host"] == "0.0.0.0"
    assert values(final, "EXPOSE") == [str(settings["port"])]
    assert values(final, "STOPSIGNAL") == ["SIGTERM"]
    assert values(final, "CMD") == []


def test_the_health_check_tells_a_server_that_is_there_from_one_that_is_not(
    stages: list[list[tuple[str, str]]], tmp_path: Path
) -> None:
    program, *arguments = health_check(stages[-1])
    assert program == "python"
    model = build("bge-m3", tmp_path / "model")

    def status(port: int) -> int:
        command = [sys.executable, *arguments]
        variables = {**os.environ, "STAGED_POOL_PORT": str(port)}
        return subprocess.run(command, env=variables, capture_output=True, timeout=60, check=False).returncode

    with ServerProcess(serve_command("--model", str(model), "--torch-threads", "1"), tmp_path / "log") as server:
        server.wait_ready()
        port = server.port
        assert status(port) == 0
        assert server.end() == 0
    assert status(port) == 1
    assert f"'{ServerConfig().port}'" in arguments[-1]


def _sent_to_the_engine(path: str) -> bool:
    """True if `.dockerignore` leaves a file in the context. A pattern for a folder covers the files in it."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = True
    for line in patterns:
        pattern = line.removeprefix("!").removeprefix("**/")
        parts = path.split("/")
        names = parts if "**/" in line else [path, *("/".join(parts[:depth]) for depth in range(1, len(parts)))]
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            sent = line[0] == "!"
    return sent


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("pyproject.toml", True),
        ("api/python/__init__.py", True),
        ("api/app/pages/docs.html", True),
        ("README.md", True),
        (".git/config", False),
        (".env", False),
        (".venv/bin/python", False),
        ("api/__pycache__/call.cpython-311.pyc", False),
        ("runtime/models/kernels/README.md", False),
        ("tests/conftest.py", False),
        ("deploy/hashes/server.txt", True),
        ("deploy/Dockerfile", False),
    ],
)
def test_files_that_the_context_has(path: str, sent: bool) -> None:
    assert _sent_to_the_engine(path) == sent


def test_the_context_builds_the_package(stages: list[list[tuple[str, str]]], tmp_path: Path) -> None:
    """The copied files alone make a wheel with the modules of the tree."""
    context = tmp_path / "context"
    for value in values(stages[0], "COPY"):
        *sources, target = value.split()
        for source in sources:
            for path in [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*")):
                name = path.relative_to(ROOT)
                if path.is_file() and _sent_to_the_engine(name.as_posix()):
                    copy = context / target / (name.relative_to(source) if name != Path(source) else name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(context)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith((".py", ".html", "py.typed"))]
    expected = [path for top in ("api", "runtime", "stages") for path in (ROOT / top).rglob("*.py")]
    assert len([name for name in modules if name.endswith(".py")]) == len(expected)
    assert "staged_pool/py.typed" in modules


def test_the_image_fits_the_chart(stages: list[list[tuple[str, str]]]) -> None:
    """User, port and volume of the chart are those of the image."""
    deployment = (CHART / "templates/deployment.yaml").read_text()
    (user,) = values(stages[-1], "USER")
    uid, gid = user.split(":")
    assert f"runAsUser: {uid}\n" in deployment
    assert f"runAsGroup: {gid}\n" in deployment
    (volume,) = values(stages[-1], "VOLUME")
    assert f"mountPath: {volume}\n" in deployment
    assert read_yaml(CHART / "values.yaml")["service"]["port"] == int(values(stages[-1], "EXPOSE")[0])
