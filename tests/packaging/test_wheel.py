"""The wheel holds every module of the tree, and nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = {
    "stages": "staged_pool/stages",
    "runtime": "staged_pool/runtime",
    "api": "staged_pool/api",
    "api/python": "staged_pool",
    "api/client": "staged_pool/client",
    "api/pool": "staged_pool/pool",
    "api/ray": "staged_pool/ray",
}
"""Places of folders in the wheel: the longest path that holds a module counts."""


def test_the_wheel_holds_what_the_tree_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    where: dict[Path, str] = {}
    for folder, place in PLACES.items():  # the longer ones come later
        for path in itertools.chain.from_iterable(
            map((ROOT / folder).rglob, ("*.py", "*.html", "*.css", "*.js", "py.typed"))
        ):
            where[path] = f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
    expected = set(where.values())
    assert found == expected
    assert licences
