"""Print the oldest version that `pyproject.toml` allows of each dependency, one a line, for `make lowest`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).parents[2] / "pyproject.toml"


def lowest() -> dict[str, str]:
    """Return the lower bound of each dependency and build requirement, by lower-case name."""
    with PROJECT.open("rb") as file:
        project = tomllib.load(file)
    found = {}
    for dependency in [*project["build-system"]["requires"], *project["project"]["dependencies"]]:
        bound = re.match(r"([\w-]+)>=([\w.]+)", dependency)
        if bound is None:
            raise ValueError(f"{dependency!r} has no lower bound")
        found[bound[1].lower()] = bound[2]
    return found


if __name__ == "__main__":
    for name, version in lowest().items():
        print(f"{name}=={version}")
