"""Examples as installed packages, without an installer: their entry points lie in a folder of the path."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from tests.packaging.floors import ROOT


def installed(example: str, site: Path) -> dict[str, str]:
    """Write the metadata of an example into a folder, from its own pyproject.toml.

    Returns:
        The environment of a process that has the example installed.
    """
    folder = ROOT / "examples" / example
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    metadata = site / f"{name}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
             for group, points in project["entry-points"].items()]  # fmt: skip
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    path = [str(site), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path)}
