"""Hashes of what the image and the release install: each version is that of the tests, and nothing is left out."""

from __future__ import annotations

import re
from importlib.metadata import requires
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.hashes import FOLDER, OF_TORCH, ROOT, entries

FILES: Final = ("server.txt", "torch.txt", "build.txt")


def versions(name: str) -> dict[str, str]:
    return {canonicalize_name(package): version for package, version, _ in entries((FOLDER / name).read_text())}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in lines if "==" in line}


def needed(*names: str) -> set[str]:
    """Return the packages that others need here, with those that these need, extras left out."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        for text in requires(waiting.pop()) or ():
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
                found.add(name)
                waiting.append(name)
    return found


@pytest.mark.parametrize("name", FILES)
def test_versions_are_those_of_the_tests(name: str) -> None:
    tested = pinned()
    found = versions(name)
    assert found
    assert {each: found[each] for each in found if each in tested} == {
        each: tested[each] for each in found if each in tested
    }


@pytest.mark.parametrize("name", FILES)
def test_each_version_has_its_hashes_and_stands_once(name: str) -> None:
    found = list(entries((FOLDER / name).read_text()))
    assert len(found) == len(versions(name))
    for package, _, entry in found:
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}$", entry.replace(" \\", ""), re.MULTILINE)
        assert len(hashes) == entry.count("--hash=") > 0, package


def test_everything_that_the_server_needs_is_there() -> None:
    server, torch = set(versions("server.txt")), set(versions("torch.txt"))
    missing = needed("staged-pool") - server
    assert {name for name in missing if not OF_TORCH.fullmatch(name)} == set()
    assert not [name for name in server if OF_TORCH.fullmatch(name)]
    assert needed("torch") | {"torch"} <= torch
    assert needed("build") | {"build", "setuptools"} <= set(versions("build.txt"))
